// A barrier in a loop that threads leave at different times: 100 columns, 64 threads, so that 36 of them have two
// columns and the others one. CUDA forbids it, and a GPU need not say so.
//
//   kernel-fusion simt docs/examples/column_loop.cu
#include <cuda_runtime.h>

#include <cstdio>

constexpr int kThreads = 64, kWidth = 100;

__global__ void sum_row(const float* x, float* sum) {
  __shared__ float part[kThreads];
  part[threadIdx.x] = 0;
  for (int c = threadIdx.x; c < kWidth; c += kThreads) {
    part[threadIdx.x] += x[c];
#ifndef MENDED
    __syncthreads();
#endif
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  *sum = 0;
  for (int k = 0; k < kThreads; ++k) *sum += part[k];
}

int main() {
  float *x, *sum;
  cudaMallocManaged(&x, kWidth * sizeof(float));
  cudaMallocManaged(&sum, sizeof(float));
  for (int c = 0; c < kWidth; ++c) x[c] = 1;
  sum_row<<<1, kThreads>>>(x, sum);
  if (cudaDeviceSynchronize() != cudaSuccess) return 1;
  std::printf("the sum of %d ones: %g\n", kWidth, *sum);
  return 0;
}
