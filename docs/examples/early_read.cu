// The host reads a sum before it has waited for the kernel that adds it up.
//
//   kernel-fusion simt docs/examples/early_read.cu         warns; a GPU prints 0, or a part of the sum
#include <cuda_runtime.h>

#include <cstdio>

constexpr int kColumns = 1 << 16;

__global__ void sum_row(const float* x, float* sum) {
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(sum, x[c]);
}

int main() {
  float *x, *sum;
  cudaMallocManaged(&x, kColumns * sizeof(float));
  cudaMallocManaged(&sum, sizeof(float));
  for (int c = 0; c < kColumns; ++c) x[c] = 1;
  *sum = 0;
  sum_row<<<kColumns / 256, 256>>>(x, sum);
#ifdef MENDED
  if (cudaDeviceSynchronize() != cudaSuccess) return 1;
#endif
  std::printf("the sum of %d ones: %g\n", kColumns, *sum);
  return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}
