// Two blocks share a row; block 0 waits for the sum of block 1, which never says that it is there.
//
//   kernel-fusion simt docs/examples/lost_flag.cu         ends within a second or two; on a GPU it never does
#include <cuda_runtime.h>

#include <cstdio>

constexpr int kThreads = 32;

__global__ void sum_row(const float* x, float* sums, int* ready) {
  float sum = x[blockIdx.x * kThreads + threadIdx.x];
  for (int away = 16; away > 0; away /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, away);
  if (threadIdx.x != 0) return;
  sums[blockIdx.x] = sum;
  __threadfence();
#ifdef MENDED
  if (blockIdx.x == 1) atomicExch(ready, 1);
#endif
  if (blockIdx.x == 1) return;
  while (atomicAdd(ready, 0) == 0) {
  }
  __threadfence();
  sums[0] += sums[1];
}

int main() {
  float *x, *sums;
  int* ready;
  cudaMallocManaged(&x, 2 * kThreads * sizeof(float));
  cudaMallocManaged(&sums, 2 * sizeof(float));
  cudaMallocManaged(&ready, sizeof(int));
  for (int c = 0; c < 2 * kThreads; ++c) x[c] = 1;
  *ready = 0;
  sum_row<<<2, kThreads>>>(x, sums, ready);
  if (cudaDeviceSynchronize() != cudaSuccess) return 1;
  std::printf("the sum of %d ones: %g\n", 2 * kThreads, sums[0]);
  return 0;
}
