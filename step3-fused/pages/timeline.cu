// A time line of one launch whose blocks stay and draw tiles from a queue: attention, and rows that wait for it.
//
//   A b.h    attention of head h for band b of rows; then attended[b] grows by 1
//   R b      y = LayerNorm(residual + attention · weight) for band b, once attended[b] is the number of heads
//
//   nvcc -O3 pages/timeline.cu && ./a.out            with a GPU; after it may come the number of blocks, and the lag
//   kernel-fusion simt pages/timeline.cu             without one
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>

constexpr int kHeads = 4, kBands = 4, kRows = 8, kLength = kBands * kRows;  // tokens, in bands of rows
constexpr int kWidth = 32, kDim = kWidth / kHeads;                          // 32 threads, each has a column
constexpr int kTiles = kBands * (kHeads + 1), kEmpty = -1, kOver = -2, kEvents = 4096;

// [row][column], for the kernel and the host.
__managed__ float v[kLength][kWidth], residual[kLength][kWidth], weight[kWidth][kWidth];
__managed__ float attention[kLength][kWidth], y[kLength][kWidth];
__managed__ int queue[kTiles];                              // of band b: b · 5 + head; head 4 are its rows
__managed__ int next, attended[kBands], completed, events;  // 0, as all variables when a program begins
__managed__ char4 event[kEvents];

// Blocks take turns, an event each, so that the picture is the same in every run; between turns all compute at once.
__device__ void wait_for_turn() {
  while (atomicAdd(&events, 0) % gridDim.x != blockIdx.x) continue;
}
__device__ void end_turn(char a, char b = ' ', char c = ' ', char d = ' ') {
  event[atomicAdd(&events, 0) % kEvents] = make_char4(a, b, c, d);
  __threadfence();
  atomicAdd(&events, 1);
}
__device__ float warp_sum(float x) {
  for (int away = 16; away > 0; away /= 2) x += __shfl_xor_sync(0xffffffffu, x, away);
  return x;
}

__global__ void dataflow() {
  const int c = threadIdx.x;
  for (int tile = 0; tile != kOver;) {
    if (c == 0) {
      wait_for_turn();
      const int place = atomicAdd(&next, 1);  // each place in the queue goes to one block, in their order
      tile = place < kTiles ? queue[place] : atomicAdd(&completed, 0) < kBands ? kEmpty : kOver;
      const char band = '0' + tile / (kHeads + 1), head = '0' + tile % (kHeads + 1);
      tile < 0 ? end_turn(' ') : head == '0' + kHeads ? end_turn('R', band) : end_turn('A', band, '.', head);
    }
    tile = __shfl_sync(0xffffffffu, tile, 0);
    if (tile < 0) continue;  // as long as others are at work, it takes its turns
    const int band = tile / (kHeads + 1), head = tile % (kHeads + 1), first = band * kRows;
    if (head == kHeads) {
      for (bool there = false; c == 0 && !there;) {
        wait_for_turn();
        there = atomicAdd(&attended[band], 0) == kHeads;
        there ? end_turn('g', 'o') : end_turn('w', 'a', 'i', 't');
      }
      __threadfence();  // acquire: what was stored before the counter grew is read after it
      __syncthreads();
      for (int row = first; row < first + kRows; ++row) {
        float x = residual[row][c];
        for (int k = 0; k < kWidth; ++k) x += attention[row][k] * weight[k][c];
        x -= warp_sum(x) / kWidth;
        y[row][c] = x * rsqrtf(warp_sum(x * x) / kWidth + 1e-5f);
      }
    } else {
      if (c == 0) wait_for_turn(), end_turn('.', '.');  // attention takes a turn longer than rows
      float sum = 0;                                    // for short all scores are equal: it is the mean so far
      for (int row = 0; row < first + kRows; ++row) {
        sum += v[row][head * kDim + c % kDim];
        if (row >= first && c < kDim) attention[row][head * kDim + c] = sum / (row + 1);
      }
    }
    __syncthreads();  // all threads have stored
    if (c == 0) {
      wait_for_turn();
      __threadfence();  // release: who sees that the counter grew sees what was stored
      atomicAdd(head == kHeads ? &completed : &attended[band], 1);
      head == kHeads ? end_turn('d', 'o', 'n', 'e') : end_turn('+', '1');
    }
  }
}

int main(int argc, char** argv) {
  const int blocks = argc > 1 ? std::atoi(argv[1]) : 3, lag = argc > 2 ? std::abs(std::atoi(argv[2])) : 1;
  for (int i = 0; i < kWidth * kWidth; ++i) weight[0][i] = std::sin(0.3f * i);
  for (int i = 0; i < kLength * kWidth; ++i) v[0][i] = std::sin(0.7f * i), residual[0][i] = std::cos(1.3f * i);
  for (int i = 0; i < kLength * kWidth; ++i) y[0][i] = NAN;  // an element that nobody writes will show
  for (int b = 0, place = 0; b < kBands + lag; ++b) {        // the heads of band b, then the rows of band b - lag
    for (int head = 0; head < kHeads && b < kBands; ++head) queue[place++] = b * (kHeads + 1) + head;
    if (b >= lag) queue[place++] = (b - lag) * (kHeads + 1) + kHeads;
  }
  dataflow<<<blocks, kWidth>>>();
  if (const cudaError_t error = blocks < 1 ? cudaErrorInvalidValue : cudaDeviceSynchronize())
    return std::printf("%s\n", cudaGetErrorString(error)), 1;
  int rows = 0, early = 0;  // bands that are complete, and how many of them before the last attention
  for (int e = 0; e < events; ++e) rows += event[e].x == 'd', early = event[e].x == '+' ? rows : early;
  for (int b = 0; b < blocks; ++b) {
    std::printf("block %d |", b);
    for (int e = b; e < events; e += blocks) std::printf(" %.4s%s", &event[e].x, e + blocks < events ? "" : "\n");
  }
  std::printf("%d of %d bands complete before the last attention\n", early, kBands);
  double worst = 0, seen[kWidth] = {};  // seen: the sums of the values
  for (int row = 0; row < kLength; ++row) {
    double x[kWidth], mean = 0, variance = 0;
    for (int c = 0; c < kWidth; ++c) seen[c] += v[row][c];
    for (int c = 0; c < kWidth; ++c) {
      x[c] = residual[row][c];
      for (int k = 0; k < kWidth; ++k) x[c] += seen[k] / (row + 1) * weight[k][c];
      mean += x[c] / kWidth;
    }
    for (int c = 0; c < kWidth; ++c) variance += (x[c] - mean) * (x[c] - mean) / kWidth;
    for (int c = 0; c < kWidth; ++c) {
      const double error = std::fabs(y[row][c] - (x[c] - mean) / std::sqrt(variance + 1e-5));
      if (error > worst || error != error) worst = error;  // a NaN enters, and stays
    }
  }
  std::printf("greatest error against the CPU in double: %.1e\n%s\n", worst, worst < 1e-5 ? "all right" : "WRONG");
  return worst < 1e-5 ? 0 : 1;
}
