// Puzzle 4, two dimensions: y = x + 10 for a matrix whose rows lie one after the other, by a block of 32 x 32 threads.
//
//   kernel-fusion learn check puzzle_04_two_dimensions
//   kernel-fusion simt docs/puzzles/solutions/puzzle_04_two_dimensions.cu
//   nvcc -std=c++17 -I common/include docs/puzzles/solutions/puzzle_04_two_dimensions.cu && ./a.out        with a GPU
//
// Counted: global load requests, global load sectors, global store sectors
#include "../puzzle.h"

__global__ void two_dimensions(const float* x, float* y, int rows, int cols) {
  // SOLUTION: y[row * cols + col], of the row and the column that are this thread's
  const int row = threadIdx.y, col = threadIdx.x;
  if (row < rows && col < cols) y[row * cols + col] = x[row * cols + col] + 10;
  // END
}

int main() { return puzzle::two_dimensions(two_dimensions); }
