// Puzzle 11, tiled product: c = a * b for matrices of n rows and n columns; a block loads each tile that it needs once.
//
//   kernel-fusion learn check puzzle_11_product
//   kernel-fusion simt docs/puzzles/solutions/puzzle_11_product.cu
//   nvcc -std=c++17 -I common/include docs/puzzles/solutions/puzzle_11_product.cu && ./a.out        with a GPU
//
// Counted: global load sectors, shared load conflicts, shared store conflicts
// Scored: barriers, shared load requests
#include "../puzzle.h"

// A block of 16 x 16 threads for each tile of c of kTile = 16 rows and columns; beyond the matrices tiles hold zeros.
__global__ void product(const float* a, const float* b, float* c, int n) {
  __shared__ float tile_a[kTile][kTile], tile_b[kTile][kTile];
  // SOLUTION: for each pair of tiles: load both, wait, add up 16 products, wait
  const int row = blockIdx.y * kTile + threadIdx.y, col = blockIdx.x * kTile + threadIdx.x;
  float sum = 0;
  for (int first = 0; first < n; first += kTile) {
    const int a_col = first + threadIdx.x, b_row = first + threadIdx.y;
    tile_a[threadIdx.y][threadIdx.x] = row < n && a_col < n ? a[row * n + a_col] : 0;
    tile_b[threadIdx.y][threadIdx.x] = b_row < n && col < n ? b[b_row * n + col] : 0;
    __syncthreads();
    for (int k = 0; k < kTile; ++k) sum += tile_a[threadIdx.y][k] * tile_b[k][threadIdx.x];
    __syncthreads();
  }
  if (row < n && col < n) c[row * n + col] = sum;
  // END
}

int main() { return puzzle::product(product); }
