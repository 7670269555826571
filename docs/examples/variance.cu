// A variance that cannot be: E[x²] − E[x]² at a mean of 10,000, where neighbouring floats near x² are 8 apart.
//
//   kernel-fusion simt docs/examples/variance.cu
#include <cuda_runtime.h>

#include <cassert>
#include <cstdio>

constexpr int kRows = 3, kWidth = 128;

__global__ void variances(const float* x, float* variance) {  // a thread a row
  const int row = threadIdx.x;
  float sum = 0, squares = 0;
  for (int c = 0; c < kWidth; ++c) sum += x[row * kWidth + c];
  const float mean = sum / kWidth;
#ifdef MENDED
  for (int c = 0; c < kWidth; ++c) squares += (x[row * kWidth + c] - mean) * (x[row * kWidth + c] - mean);
  variance[row] = squares / kWidth;
#else
  for (int c = 0; c < kWidth; ++c) squares += x[row * kWidth + c] * x[row * kWidth + c];
  variance[row] = squares / kWidth - mean * mean;
#endif
  if (row == 1) printf("row %d: mean %g, variance %g\n", row, mean, variance[row]);
  assert(variance[row] > 0);
}

int main() {
  float *x, *variance;
  cudaMallocManaged(&x, kRows * kWidth * sizeof(float));
  cudaMallocManaged(&variance, kRows * sizeof(float));
  for (int i = 0; i < kRows * kWidth; ++i) x[i] = (i / kWidth == 1 ? 10000.f : 0.f) + (i % 2 ? 0.5f : -0.5f);
  variances<<<1, kRows>>>(x, variance);
  const cudaError_t error = cudaDeviceSynchronize();
  std::printf("%s\n", cudaGetErrorString(error));
  return error != cudaSuccess;
}
