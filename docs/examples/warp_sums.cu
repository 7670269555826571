// Shared memory that nobody wrote: a block of 96 threads has 3 warps, and 32 of their sums are added up.
//
//   kernel-fusion simt docs/examples/warp_sums.cu         NaN, since fresh shared memory holds NaN
#include <cuda_runtime.h>

#include <cstdio>

constexpr int kThreads = 96, kWidth = 960;
#ifdef MENDED
constexpr int kSums = kThreads / 32;
#else
constexpr int kSums = 32;
#endif

__global__ void mean_of_row(const float* x, float* mean) {
  __shared__ float sums[32];
  float sum = 0;
  for (int c = threadIdx.x; c < kWidth; c += kThreads) sum += x[c];
  for (int away = 16; away > 0; away /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, away);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float all = 0;
  for (int warp = 0; warp < kSums; ++warp) all += sums[warp];
  *mean = all / kWidth;
}

int main() {
  float *x, *mean;
  cudaMallocManaged(&x, kWidth * sizeof(float));
  cudaMallocManaged(&mean, sizeof(float));
  for (int c = 0; c < kWidth; ++c) x[c] = 1;
  mean_of_row<<<1, kThreads>>>(x, mean);
  if (cudaDeviceSynchronize() != cudaSuccess) return 1;
  std::printf("the mean of %d ones: %g\n", kWidth, *mean);
  return 0;
}
