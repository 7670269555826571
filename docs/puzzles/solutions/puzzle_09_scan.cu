// Puzzle 9, scan: y[i] = x[0] + x[1] + ... + x[i].
//
//   kernel-fusion learn check puzzle_09_scan
//   kernel-fusion simt docs/puzzles/solutions/puzzle_09_scan.cu
//   nvcc -std=c++17 -I common/include docs/puzzles/solutions/puzzle_09_scan.cu && ./a.out        with a GPU
//
// Counted: global load requests, shared load conflicts
// Scored: barriers, shared load requests, shuffles
#include "../puzzle.h"

// One block of kThreads = 128 threads, and at most as many numbers.
__global__ void scan(const float* x, float* y, int n) {
  // SOLUTION: seven rounds; in each a thread adds to its sum what stands 1, 2, 4 ... 64 before it
  // | __shared__ float sums[kThreads];
  __shared__ float warps[kThreads / 32];
  const int i = threadIdx.x, lane = i % 32;
  float sum = i < n ? x[i] : 0;
  for (int back = 1; back < 32; back *= 2) {
    const float before = __shfl_up_sync(0xffffffffu, sum, back);
    if (lane >= back) sum += before;
  }
  if (lane == 31) warps[i / 32] = sum;
  __syncthreads();
  for (int warp = 0; warp < i / 32; ++warp) sum += warps[warp];
  if (i < n) y[i] = sum;
  // END
}

int main() { return puzzle::scan(scan); }
