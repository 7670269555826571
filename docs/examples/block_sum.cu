// A sum with a fault in it, for the session in docs/gdb.md: each block adds 256 numbers in shared memory, halving
// them again and again.
//
//   kernel-fusion simt docs/examples/block_sum.cu      4 blocks of ones: 9 9 9 9, where each should be 256
#include <cuda_runtime.h>

#include <cstdio>

constexpr int kThreads = 256;
constexpr int kBlocks = 4;

__global__ void block_sum(const float* x, float* sums) {
  __shared__ float tile[kThreads];
  const int thread = threadIdx.x;
  const int i = blockIdx.x * kThreads + thread;
  tile[thread] = x[i];
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (thread < half) tile[thread] += tile[thread + half];
#ifdef MENDED
    __syncthreads();
#endif
  }
  if (thread == 0) sums[blockIdx.x] = tile[0];
}

int main() {
  float *x, *sums;
  cudaMallocManaged(&x, kBlocks * kThreads * sizeof(float));
  cudaMallocManaged(&sums, kBlocks * sizeof(float));
  for (int i = 0; i < kBlocks * kThreads; ++i) x[i] = 1;

  block_sum<<<kBlocks, kThreads>>>(x, sums);
  if (cudaDeviceSynchronize() != cudaSuccess) return 1;
  for (int block = 0; block < kBlocks; ++block) std::printf("%g ", sums[block]);
  std::printf("\n");
  return 0;
}
