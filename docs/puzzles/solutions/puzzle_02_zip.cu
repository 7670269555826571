// Puzzle 2, zip: y[i] = a[i] + b[i], by as many threads as there are numbers, all in one block.
//
//   kernel-fusion learn check puzzle_02_zip
//   kernel-fusion simt docs/puzzles/solutions/puzzle_02_zip.cu
//   nvcc -std=c++17 -I common/include docs/puzzles/solutions/puzzle_02_zip.cu && ./a.out        with a GPU
//
// Counted: global load requests, global load sectors, global store requests
#include "../puzzle.h"

__global__ void zip(const float* a, const float* b, float* y) {
  // SOLUTION: one number of y
  const int i = threadIdx.x;
  y[i] = a[i] + b[i];
  // END
}

int main() { return puzzle::zip(zip); }
