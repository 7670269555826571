// A tile without padding, written by rows and read by columns: the 32 elements of a column lie in one bank.
//
//   kernel-fusion simt --count docs/examples/tile_banks.cu
#include <cuda_runtime.h>

#include <cstdio>

constexpr int kTile = 32, kSize = 256;
#ifdef MENDED
constexpr int kPadding = 1;
#else
constexpr int kPadding = 0;
#endif

__global__ void transpose(const float* x, float* y) {
  __shared__ float tile[kTile][kTile + kPadding];
  const int row = blockIdx.y * kTile + threadIdx.y, col = blockIdx.x * kTile + threadIdx.x;
  tile[threadIdx.y][threadIdx.x] = x[row * kSize + col];
  __syncthreads();
  const int to_row = blockIdx.x * kTile + threadIdx.y, to_col = blockIdx.y * kTile + threadIdx.x;
  y[to_row * kSize + to_col] = tile[threadIdx.x][threadIdx.y];
}

int main() {
  float *x, *y;
  cudaMallocManaged(&x, kSize * kSize * sizeof(float));
  cudaMallocManaged(&y, kSize * kSize * sizeof(float));
  for (int i = 0; i < kSize * kSize; ++i) x[i] = i;
  transpose<<<dim3(kSize / kTile, kSize / kTile), dim3(kTile, kTile)>>>(x, y);
  if (cudaDeviceSynchronize() != cudaSuccess) return 1;
  std::printf("row 1 begins with %g %g\n", y[kSize], y[kSize + 1]);
  return 0;
}
