// Puzzle 3, guard: y[i] = x[i] + 10 for n numbers, by a block that has more threads than that.
//
//   kernel-fusion learn check puzzle_03_guard
//   kernel-fusion simt docs/puzzles/solutions/puzzle_03_guard.cu
//   nvcc -std=c++17 -I common/include docs/puzzles/solutions/puzzle_03_guard.cu && ./a.out        with a GPU
//
// Counted: global load requests, global load sectors, global store requests
#include "../puzzle.h"

__global__ void guard(const float* x, float* y, int n) {
  // SOLUTION: one number of y, by a thread that has one
  const int i = threadIdx.x;
  if (i < n) y[i] = x[i] + 10;
  // END
}

int main() { return puzzle::guard(guard); }
