// Puzzle 10, histogram: counts[b] is how many of n numbers, 0 to 7, are b. It is 0 before the launch.
//
//   kernel-fusion learn check puzzle_10_histogram
//   kernel-fusion simt docs/puzzles/solutions/puzzle_10_histogram.cu
//   nvcc -std=c++17 -I common/include docs/puzzles/solutions/puzzle_10_histogram.cu && ./a.out        with a GPU
//
// Counted: global load requests
// Scored: global atomic requests, shared atomic requests, barriers
#include "../puzzle.h"

// Blocks of kThreads = 128 threads.
__global__ void histogram(const int* x, int* counts, int n) {
  // SOLUTION: count this thread's number, so that no other thread's count is lost
  __shared__ int ours[kBins];
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (threadIdx.x < kBins) ours[threadIdx.x] = 0;
  __syncthreads();
  if (i < n) atomicAdd(&ours[x[i]], 1);
  __syncthreads();
  if (threadIdx.x < kBins) atomicAdd(&counts[threadIdx.x], ours[threadIdx.x]);
  // END
}

int main() { return puzzle::histogram(histogram); }
