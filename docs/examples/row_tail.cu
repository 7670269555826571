// A LayerNorm row whose last columns are never written: four columns a thread, and 1002 is no multiple of 4.
//
//   kernel-fusion simt docs/examples/row_tail.cu          the last sum is NaN, since fresh memory holds NaN
#include <cuda_runtime.h>

#include <cstdio>

constexpr int kWidth = 1002;

__global__ void scale_row(const float* x, const float* rstd, float* y) {
  const int whole = kWidth / 4 * 4;
  for (int c = 4 * threadIdx.x; c < whole; c += 4 * blockDim.x) {
    for (int j = 0; j < 4; ++j) y[c + j] = x[c + j] * *rstd;
  }
#ifdef MENDED
  for (int c = whole + threadIdx.x; c < kWidth; c += blockDim.x) y[c] = x[c] * *rstd;
#endif
}

__global__ void add_residual(const float* y, const float* residual, float* sum) {
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c < kWidth) sum[c] = y[c] + residual[c];
}

int main() {
  static float ones[kWidth], sums[kWidth];
  for (float& one : ones) one = 1;
  float *x, *y, *sum;
  cudaMalloc(&x, sizeof(ones));
  cudaMalloc(&y, sizeof(ones));
  cudaMalloc(&sum, sizeof(ones));
  cudaMemcpy(x, ones, sizeof(ones), cudaMemcpyHostToDevice);
  scale_row<<<1, 128>>>(x, x, y);
  add_residual<<<4, 256>>>(y, x, sum);
  cudaMemcpy(sums, sum, sizeof(sums), cudaMemcpyDeviceToHost);
  std::printf("columns 0, 999, 1000, 1001: %g %g %g %g\n", sums[0], sums[999], sums[1000], sums[1001]);
  return 0;
}
