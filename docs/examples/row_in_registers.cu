// Rows that were meant to stay in registers. In `rotated` an index is known only at run time, and registers have no
// addresses; `centred` may have 32 registers and needs more. Both take local memory, which is memory.
//
//   nvcc -O3 -arch=native -Xptxas -v docs/examples/row_in_registers.cu
#include <cuda_runtime.h>

constexpr int kWidth = 48, kThreads = 1024;
#ifdef MENDED
constexpr int kBlocks = 1;
#else
constexpr int kBlocks = 2;  // at a time on a multiprocessor: 65536 registers / 2048 threads = 32
#endif

__global__ void rotated(const float* x, float* y, int by) {  // a thread a row; columns are kThreads apart
  float row[kWidth];
  for (int c = 0; c < kWidth; ++c) row[c] = x[c * kThreads + threadIdx.x];
#ifdef MENDED
  for (int c = 0; c < kWidth; ++c) y[(c + kWidth - by) % kWidth * kThreads + threadIdx.x] = row[c];
#else
  for (int c = 0; c < kWidth; ++c) y[c * kThreads + threadIdx.x] = row[(c + by) % kWidth];
#endif
}

__global__ void __launch_bounds__(kThreads, kBlocks) centred(const float* x, float* y) {
  float row[kWidth], sum = 0;
  for (int c = 0; c < kWidth; ++c) sum += row[c] = x[c * kThreads + threadIdx.x];
  for (int c = 0; c < kWidth; ++c) y[c * kThreads + threadIdx.x] = row[c] - sum / kWidth;
}

int main() {
  float *x, *y;
  cudaMallocManaged(&x, kWidth * kThreads * sizeof(float));
  cudaMallocManaged(&y, kWidth * kThreads * sizeof(float));
  rotated<<<1, kThreads>>>(x, y, 5);
  centred<<<1, kThreads>>>(x, y);
  return cudaDeviceSynchronize() != cudaSuccess;
}
