// Puzzle 7, transpose: y[col][row] = x[row][col]. Whole sectors are loaded and stored, and no bank is waited for.
//
//   kernel-fusion learn check puzzle_07_transpose
//   kernel-fusion simt docs/puzzles/solutions/puzzle_07_transpose.cu
//   nvcc -std=c++17 -I common/include docs/puzzles/solutions/puzzle_07_transpose.cu && ./a.out        with a GPU
//
// Counted: global load sectors, global store sectors, shared load conflicts, shared store conflicts
// Scored: barriers
#include "../puzzle.h"

// A block of 32 x 32 threads for each tile of 32 rows and 32 columns; blockIdx.y is its row of tiles.
__global__ void transpose(const float* x, float* y, int rows, int cols) {
  // SOLUTION: load a tile row by row; wait; store rows of y, which are columns of the tile. Then look at the conflicts
  // | __shared__ float tile[32][32];
  __shared__ float tile[32][33];  // one more: the 32 numbers of a column are in 32 banks
  const int row = blockIdx.y * 32 + threadIdx.y, col = blockIdx.x * 32 + threadIdx.x;
  if (row < rows && col < cols) tile[threadIdx.y][threadIdx.x] = x[row * cols + col];
  __syncthreads();
  const int y_row = blockIdx.x * 32 + threadIdx.y, y_col = blockIdx.y * 32 + threadIdx.x;
  if (y_row < cols && y_col < rows) y[y_row * rows + y_col] = tile[threadIdx.x][threadIdx.y];
  // END
}

int main() { return puzzle::transpose(transpose); }
