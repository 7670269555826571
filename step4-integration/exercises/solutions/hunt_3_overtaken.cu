// Bug hunt 3: layers in one launch, whose blocks send each other messages; now and then one is overwritten too early.
//
//   kernel-fusion learn check hunt_3_overtaken
//   kernel-fusion simt exercises/solutions/hunt_3_overtaken.cu
//   nvcc -O3 -I ../common/include exercises/solutions/hunt_3_overtaken.cu && ./a.out      with a GPU
#include <kf/exercise.h>

#include "../../kernels/decode_step/schedule_check.h"

using kf::decode_step::Action;

// A layer is a product: each of the rows of x needs all of them. A block has a row, and some of the logits.
constexpr int kRows = 6, kLogits = 40, kLayers = 8;

// ---- the schedule, which the kernel and its check read ----

// SOLUTION
// | constexpr int kBlocks = 8;  // as many as there is room for
// | constexpr int kWords = kRows;
// | // Where the row lies that a layer has made. Its tag is the layer, from 1 on.
// | __host__ __device__ constexpr int place(int, int row) { return row; }
constexpr int kBlocks = kRows;  // none without a row: nobody would wait for it, so it could be overtaken
constexpr int kWords = 2 * kRows;
// Where the row lies that a layer has made. Its tag is the layer, from 1 on.
__host__ __device__ constexpr int place(int layer, int row) { return layer % 2 * kRows + row; }
// END

// What a block does, in this order. A message is waited for and read at once; the check has two actions for it.
std::vector<Action> actions_of(int block) {
  std::vector<Action> actions;
  for (int layer = 1; layer <= kLayers; ++layer) {
    if (block < kRows) actions.push_back({Action::kWrite, place(layer, block), 1, layer});
    for (int row = 0; row < kRows; ++row) {
      actions.push_back({Action::kWait, place(layer, row), 1, layer});
      actions.push_back({Action::kRead, place(layer, row), 1, layer});
    }
  }
  return actions;
}

// ---- the kernel ----

using Message = unsigned long long;  // a value and its tag, which are seen together

__device__ void send(Message* to, float value, int tag) {
  atomicExch(to, Message{__float_as_uint(value)} << 32 | static_cast<unsigned>(tag));
}
__device__ float receive(Message* from, int tag) {
  for (int polls = 0; polls < 1 << 18; ++polls) {  // then it will not come any more
    const Message seen = atomicAdd(from, 0ull);
    if (static_cast<unsigned>(seen) == static_cast<unsigned>(tag)) return __uint_as_float(seen >> 32);
  }
  return NAN;
}

__host__ __device__ float weight(int layer, int row, int column) {
  return 0.1f * static_cast<float>((7 * layer + 5 * row + 3 * column) % 11 - 5);
}

// A warp a block, a lane a row of x.
__global__ void token(Message* messages, float* logits) {
  const int block = blockIdx.x, lane = threadIdx.x;
  float x = lane < kRows ? 1.f + lane : 0, own = 1.f + block;
  const auto product = [&](int layer, int row) {
    float sum = 0;
    for (int column = 0; column < kRows; ++column) {
      sum += weight(layer, row, column) * __shfl_sync(0xffffffffu, x, column);
    }
    return sum;
  };
  for (int layer = 1; layer <= kLayers; ++layer) {
    own += product(layer, block);
    if (block < kRows && lane == 0) send(messages + place(layer, block), own, layer);
    if (lane < kRows) x = receive(messages + place(layer, lane), layer);
  }
  for (int i = block; i < kLogits; i += kBlocks) {
    const float sum = product(0, i);
    if (lane == 0) logits[i] = sum;
  }
}

// Whether the schedule works, whichever block is the faster one.
bool works() {
  using namespace kf::decode_step;
  Program program;
  program.words = kWords;
  program.warps.resize(kBlocks * (kConsumers + 2));  // a block's first warp has all the work here
  for (int block = 0; block < kBlocks; ++block) program.of(block, 0) = actions_of(block);
  for (unsigned order = 0; order < 200; ++order) {
    const std::string fault = fault_of(program, order);
    if (fault.empty()) continue;
    std::printf("WRONG: in order %u %s\n", order, fault.c_str());
    return false;
  }
  if (kWords > 2 * kRows) std::printf("WRONG: %d words for messages, and %d are enough\n", kWords, 2 * kRows);
  return kWords <= 2 * kRows;
}

bool right() {
  std::vector<float> logits(kLogits, NAN);
  const OnGpu<float> gpu_logits(logits);
  const OnGpu<Message> messages(std::vector<Message>(kWords, 0));
  token<<<kBlocks, 32>>>(messages.data, gpu_logits.data);
  CHECK(cudaGetLastError());
  gpu_logits.read(logits);
  std::vector<double> x(kRows), before;
  for (int row = 0; row < kRows; ++row) x[row] = 1 + row;
  const auto product = [&](int layer, int row) {
    double sum = 0;
    for (int column = 0; column < kRows; ++column) sum += weight(layer, row, column) * before[column];
    return sum;
  };
  for (int layer = 1; layer <= kLayers; ++layer) {
    before = x;
    for (int row = 0; row < kRows; ++row) x[row] += product(layer, row);
  }
  before = x;
  for (int i = 0; i < kLogits; ++i) {
    if (std::fabs(logits[i] - product(0, i)) <= 1e-4) continue;
    std::printf("WRONG: logits[%d] is %g, must be %g\n", i, logits[i], product(0, i));
    return false;
  }
  return true;
}

int main() {
  const bool both = works() && right();
  std::printf(both ? "all right\n" : "Hint: who may still need what lies there, and what has it said?\n");
  return both ? 0 : 1;
}
