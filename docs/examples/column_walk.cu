// The sums of a matrix's rows, a thread a row: in each step the 32 lanes of a warp read from 32 rows, far apart.
//
//   kernel-fusion simt --count docs/examples/column_walk.cu
#include <cuda_runtime.h>

#include <cstdio>

constexpr int kRows = 1024, kWidth = 256;

__global__ void sum_rows(const float* x, float* sums) {
  float sum = 0;
#ifdef MENDED
  const int row = blockIdx.x;  // a warp a row: the lanes read neighbours
  for (int c = threadIdx.x; c < kWidth; c += 32) sum += x[row * kWidth + c];
  for (int away = 16; away > 0; away /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, away);
  if (threadIdx.x == 0) sums[row] = sum;
#else
  const int row = blockIdx.x * 32 + threadIdx.x;
  for (int c = 0; c < kWidth; ++c) sum += x[row * kWidth + c];
  sums[row] = sum;
#endif
}

int main() {
  float *x, *sums;
  cudaMallocManaged(&x, kRows * kWidth * sizeof(float));
  cudaMallocManaged(&sums, kRows * sizeof(float));
  for (int i = 0; i < kRows * kWidth; ++i) x[i] = 1;
#ifdef MENDED
  sum_rows<<<kRows, 32>>>(x, sums);
#else
  sum_rows<<<kRows / 32, 32>>>(x, sums);
#endif
  if (cudaDeviceSynchronize() != cudaSuccess) return 1;
  std::printf("rows 0 and %d: %g %g\n", kRows - 1, sums[0], sums[kRows - 1]);
  return 0;
}
