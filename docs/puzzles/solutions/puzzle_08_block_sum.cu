// Puzzle 8, block sum: y[b] is the sum of the numbers that the threads of block b have, one each.
//
//   kernel-fusion learn check puzzle_08_block_sum
//   kernel-fusion simt docs/puzzles/solutions/puzzle_08_block_sum.cu
//   nvcc -std=c++17 -I common/include docs/puzzles/solutions/puzzle_08_block_sum.cu && ./a.out        with a GPU
//
// Counted: global load requests, global store requests, shared load conflicts
// Scored: barriers, shared load requests, shuffles
#include "../puzzle.h"

// Blocks of kThreads = 128 threads; the last one may have fewer numbers.
__global__ void block_sum(const float* x, float* y, int n) {
  // SOLUTION: halve the number of sums until one is left; y[blockIdx.x] is written by one thread
  // | __shared__ float sums[kThreads];
  __shared__ float sums[kThreads / 32];
  const int i = blockIdx.x * kThreads + threadIdx.x;
  float sum = i < n ? x[i] : 0;
  for (int half = 16; half > 0; half /= 2) sum += __shfl_down_sync(0xffffffffu, sum, half);  // within a warp
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) y[blockIdx.x] = sums[0] + sums[1] + sums[2] + sums[3];
  // END
}

int main() { return puzzle::block_sum(block_sum); }
