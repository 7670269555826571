// Exercise 10: a queue and its counters, which a launch leaves as it found them, so that none needs a memset before it.
//
//   kernel-fusion learn check 10_next_launch
//   kernel-fusion simt exercises/solutions/10_next_launch.cu
//   nvcc -O3 -I ../common/include exercises/solutions/10_next_launch.cu && ./a.out        with a GPU
#include <kf/exercise.h>

constexpr int kHeads = 4, kDim = 8, kWidth = kHeads * kDim, kRows = 32 / kDim, kMaxBands = 16;
constexpr int kGroup = kHeads + 1;  // tiles of a band

struct Tile {
  int band, head;  // head kHeads: the rows of the band, which wait for all of its heads
};

// The heads of a band, then its rows.
__device__ Tile tile_at(int index) { return {index / kGroup, index % kGroup}; }

// 0 before each launch, if the one before has left them so: tiles drawn; of each band, heads that are there; blocks
// that have left.
__device__ int next, attended[kMaxBands], left;

// Blocks of 32 threads, as many as you like: they stay, and draw tiles. A head's tile squares, for short; a band's rows
// are added up when all of their heads are there. All arrays are [row][column].
__global__ void dataflow(const float* v, float* squared, float* y, int bands) {
  const int t = threadIdx.x;
  for (;;) {
    int index = t == 0 ? atomicAdd(&next, 1) : 0;
    index = __shfl_sync(0xffffffffu, index, 0);
    if (index >= bands * kGroup) break;
    const Tile tile = tile_at(index);
    const int first = tile.band * kRows * kWidth;
    if (tile.head < kHeads) {
      const int i = first + t / kDim * kWidth + tile.head * kDim + t % kDim;
      squared[i] = v[i] * v[i];
      __syncthreads();
      __threadfence();
      if (t == 0) atomicAdd(&attended[tile.band], 1);
    } else {
      while (t == 0 && atomicAdd(&attended[tile.band], 0) < kHeads) continue;
      __threadfence();
      __syncthreads();
      float sum = 0;
      for (int c = 0; t < kRows && c < kWidth; ++c) sum += squared[first + t * kWidth + c];
      if (t < kRows) y[tile.band * kRows + t] = sum;
      // SOLUTION: the band's counter is 0 again. Who else may still want it?
      if (t == 0) atomicExch(&attended[tile.band], 0);  // nobody: all heads have counted, and these rows have waited
      // END
    }
  }
  // SOLUTION: the queue is at its beginning again, when nobody draws from it any more
  if (t != 0) return;
  __threadfence();  // what this block has drawn, it drew before it left
  if (atomicAdd(&left, 1) < gridDim.x - 1) return;
  __threadfence();  // all have left
  atomicExch(&next, 0);
  atomicExch(&left, 0);
  // END
}

bool right(int launch, int bands, int blocks) {
  std::vector<float> v(bands * kRows * kWidth), squared(v.size(), NAN), y(bands * kRows, NAN);
  for (size_t i = 0; i < v.size(); ++i) v[i] = std::sin(0.7f * (i + launch));
  {
    const OnGpu gpu_v(v), gpu_squared(squared), gpu_y(y);
    dataflow<<<blocks, 32>>>(gpu_v.data, gpu_squared.data, gpu_y.data, bands);
    CHECK(cudaGetLastError());
    gpu_y.read(y);
  }
  for (int row = 0; row < bands * kRows; ++row) {
    double expected = 0;
    for (int c = 0; c < kWidth; ++c) expected += double(v[row * kWidth + c]) * v[row * kWidth + c];
    if (std::fabs(y[row] - expected) <= 1e-4) continue;
    std::printf("WRONG: launch %d, %d bands: y[%d] is %g, must be %g\n", launch, bands, row, y[row], expected);
    return false;
  }
  int after[kMaxBands + 2];
  CHECK(cudaMemcpyFromSymbol(after, attended, sizeof attended));
  CHECK(cudaMemcpyFromSymbol(after + kMaxBands, next, sizeof next));
  CHECK(cudaMemcpyFromSymbol(after + kMaxBands + 1, left, sizeof left));
  for (int i = 0; i < kMaxBands + 2; ++i) {
    if (after[i] == 0) continue;
    std::printf("WRONG: launch %d is right, but leaves ", launch);
    std::printf(i < kMaxBands ? "attended[%d]" : i == kMaxBands ? "next" : "left", i);
    std::printf(" at %d\n", after[i]);
    return false;
  }
  return true;
}

int main() {
  int launch = 0;
  for (const int blocks : {3, 1, 7, 3}) {
    ++launch;
    if (!right(launch, launch % 2 == 1 ? kMaxBands : 3, blocks)) return 1;
  }
  std::printf("all right\n");
  return 0;
}
