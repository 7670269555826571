// A tile that reaches over the edge of a matrix: 20 rows in tiles of 16. What is read there is never used, so the
// result is right and no comparison sees it.
//
//   kernel-fusion simt --asan docs/examples/tile_edge.cu
#include <cuda_runtime.h>

#include <cstdio>

constexpr int kTile = 16, kRows = 20, kCols = 16;

__global__ void transpose(const float* x, float* y) {
  __shared__ float tile[kTile][kTile + 1];
  const int row = blockIdx.x * kTile + threadIdx.y;
#ifdef MENDED
  if (row < kRows)
#endif
    tile[threadIdx.y][threadIdx.x] = x[row * kCols + threadIdx.x];
  __syncthreads();
  const int col = blockIdx.x * kTile + threadIdx.x;
  if (col < kRows) y[threadIdx.y * kRows + col] = tile[threadIdx.x][threadIdx.y];
}

int main() {
  static float in[kRows * kCols], out[kRows * kCols];
  for (int i = 0; i < kRows * kCols; ++i) in[i] = i;
  float *x, *y;
  cudaMalloc(&x, sizeof(in));
  cudaMalloc(&y, sizeof(out));
  cudaMemcpy(x, in, sizeof(in), cudaMemcpyHostToDevice);
  transpose<<<2, dim3(kTile, kTile)>>>(x, y);
  cudaMemcpy(out, y, sizeof(out), cudaMemcpyDeviceToHost);
  int wrong = 0;
  for (int i = 0; i < kRows * kCols; ++i) wrong += out[i % kCols * kRows + i / kCols] != in[i];
  std::printf("%d of %d elements are wrong\n", wrong, kRows * kCols);
  return 0;
}
