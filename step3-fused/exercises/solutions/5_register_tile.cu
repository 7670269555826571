// Exercise 5: a product of matrices, 8 x 8 outputs a thread: few reads of shared memory for many products.
//
//   kernel-fusion learn check 5_register_tile
//   kernel-fusion simt exercises/solutions/5_register_tile.cu
//   nvcc -O3 -I ../common/include exercises/solutions/5_register_tile.cu && ./a.out        with a GPU
//
// Counted: shared load requests
#include <kf/exercise.h>

constexpr int kTile = 64, kDepth = 16;  // a block's outputs: 64 x 64; 16 of the depth at a time
constexpr int kEach = 8, kApart = kTile / kEach, kThreads = kApart * kApart;  // a thread's: 8 x 8, 8 apart

__device__ unsigned long long loads;

// All reads of the tiles go through here, and are counted.
__device__ float load(const float* tile, int i) {
  atomicAdd(&loads, 1ull);
  return tile[i];
}

__global__ void product(const float* a, const float* b, float* y, int rows, int depth, int columns) {
  __shared__ float a_tile[kDepth * kTile], b_tile[kDepth * kTile];  // [k][row] and [k][column]
  const int first_row = blockIdx.y * kTile, first_column = blockIdx.x * kTile;
  const int tx = threadIdx.x % kApart, ty = threadIdx.x / kApart;
  float sum[kEach][kEach] = {};  // of row ty + i * kApart and column tx + j * kApart of the tile
  for (int first_k = 0; first_k < depth; first_k += kDepth) {
    for (int e = threadIdx.x; e < kTile * kDepth; e += kThreads) {
      const int k = first_k + e / kTile, row = first_row + e % kTile, column = first_column + e % kTile;
      a_tile[e] = k < depth && row < rows ? a[row * depth + k] : 0;
      b_tile[e] = k < depth && column < columns ? b[k * columns + column] : 0;
    }
    __syncthreads();
    for (int k = 0; k < kDepth; ++k) {
      const int of_row = k * kTile + ty, of_column = k * kTile + tx;  // of the thread's first row and column
      // SOLUTION: the same 64 products from 16 reads
      // | for (int i = 0; i < kEach; ++i) {
      // |   for (int j = 0; j < kEach; ++j) {
      // |     sum[i][j] += load(a_tile, of_row + i * kApart) * load(b_tile, of_column + j * kApart);
      // |   }
      // | }
      float of_a[kEach], of_b[kEach];
      for (int i = 0; i < kEach; ++i) {
        of_a[i] = load(a_tile, of_row + i * kApart);
        of_b[i] = load(b_tile, of_column + i * kApart);
      }
      for (int i = 0; i < kEach; ++i) {
        for (int j = 0; j < kEach; ++j) sum[i][j] += of_a[i] * of_b[j];
      }
      // END
    }
    __syncthreads();
  }
  for (int i = 0; i < kEach; ++i) {
    for (int j = 0; j < kEach; ++j) {
      const int row = first_row + ty + i * kApart, column = first_column + tx + j * kApart;
      if (row < rows && column < columns) y[row * columns + column] = sum[i][j];
    }
  }
}

bool right(int rows, int depth, int columns) {
  std::vector<float> a(rows * depth), b(depth * columns), y(rows * columns, NAN);
  for (int i = 0; i < rows * depth; ++i) a[i] = static_cast<float>(i * 7919 % 17 - 8);
  for (int i = 0; i < depth * columns; ++i) b[i] = static_cast<float>(i * 31 % 13 - 6);
  const dim3 grid((columns + kTile - 1) / kTile, (rows + kTile - 1) / kTile);
  const unsigned long long none = 0;
  unsigned long long count;
  CHECK(cudaMemcpyToSymbol(loads, &none, sizeof none));
  {
    const OnGpu gpu_a(a), gpu_b(b), gpu_y(y);
    product<<<grid, kThreads>>>(gpu_a.data, gpu_b.data, gpu_y.data, rows, depth, columns);
    CHECK(cudaGetLastError());
    gpu_y.read(y);
  }
  CHECK(cudaMemcpyFromSymbol(&count, loads, sizeof count));
  for (int i = 0; i < rows * columns; ++i) {
    float expected = 0;  // small whole numbers: exact in any order
    for (int k = 0; k < depth; ++k) expected += a[i / columns * depth + k] * b[k * columns + i % columns];
    if (y[i] == expected) continue;
    std::printf("WRONG: %d x %d x %d: y[%d][%d] is %g, must be %g\n", rows, depth, columns, i / columns, i % columns,
                y[i], expected);
    return false;
  }
  const double products = 1.0 * grid.x * grid.y * kTile * kTile * ((depth + kDepth - 1) / kDepth * kDepth);
  if (count / products <= 0.25) return true;
  std::printf("WRONG: right, but %g reads for each product; 0.25 are enough\n", count / products);
  return false;
}

int main() {
  if (!right(64, 32, 64) || !right(70, 40, 100) || !right(1, 1, 1)) return 1;
  std::printf("all right\n");
  return 0;
}
