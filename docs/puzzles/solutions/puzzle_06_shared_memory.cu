// Puzzle 6, shared memory: y[i] = x[i - 1] + x[i] + x[i + 1], where each x is loaded once. Beside the line there are
// zeros.
//
//   kernel-fusion learn check puzzle_06_shared_memory
//   kernel-fusion simt docs/puzzles/solutions/puzzle_06_shared_memory.cu
//   nvcc -std=c++17 -I common/include docs/puzzles/solutions/puzzle_06_shared_memory.cu && ./a.out        with a GPU
//
// Counted: global load requests, shared load conflicts
// Scored: barriers
#include "../puzzle.h"

// One block of kThreads = 128 threads, and at most as many numbers.
__global__ void shared_memory(const float* x, float* y, int n) {
  __shared__ float near[kThreads];
  // SOLUTION: load x[i] into near[i]; wait for all threads of the block; add up three of near
  const int i = threadIdx.x;
  if (i < n) near[i] = x[i];
  __syncthreads();
  if (i < n) y[i] = (i > 0 ? near[i - 1] : 0) + near[i] + (i + 1 < n ? near[i + 1] : 0);
  // END
}

int main() { return puzzle::shared_memory(shared_memory); }
