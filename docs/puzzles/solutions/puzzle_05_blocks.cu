// Puzzle 5, blocks: y[i] = x[i] + 10 for n numbers, by as many blocks as that takes.
//
//   kernel-fusion learn check puzzle_05_blocks
//   kernel-fusion simt docs/puzzles/solutions/puzzle_05_blocks.cu
//   nvcc -std=c++17 -I common/include docs/puzzles/solutions/puzzle_05_blocks.cu && ./a.out        with a GPU
//
// Counted: global load requests, global load sectors, global store requests
#include "../puzzle.h"

__global__ void blocks(const float* x, float* y, int n) {
  // SOLUTION: one number of y; blockDim.x is how many threads a block has, blockIdx.x which block this is
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] + 10;
  // END
}

int main() { return puzzle::blocks(blocks); }
