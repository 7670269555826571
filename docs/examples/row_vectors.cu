// Rows read 16 bytes at a time, with a width that is no multiple of 4: row 1 begins at an address that is none of 16.
// The kernel waits a little first, so that on a GPU the next launch has been made before the fault.
//
//   kernel-fusion simt --asan docs/examples/row_vectors.cu
#include <cuda_runtime.h>

#include <cstdio>

#ifdef MENDED
constexpr int kWidth = 100;
#else
constexpr int kWidth = 102;
#endif

__global__ void first_four(const float* x, float* sums) {
  const long long begin = clock64();
  while (clock64() - begin < 20'000'000) {
  }
  const float4 four = *reinterpret_cast<const float4*>(x + threadIdx.x * kWidth);
  sums[threadIdx.x] = four.x + four.y + four.z + four.w;
}

__global__ void halve(float* sums) { sums[threadIdx.x] /= 2; }

void say(const char* after) { std::printf("%-10s %s\n", after, cudaGetErrorString(cudaPeekAtLastError())); }

int main() {
  float *x, *sums;
  cudaMalloc(&x, 2 * kWidth * sizeof(float));
  cudaMalloc(&sums, 2 * sizeof(float));
  cudaMemset(x, 0, 2 * kWidth * sizeof(float));
  halve<<<1, 2>>>(sums);  // a kernel's first launch may wait for those before it, so this is out of the way
  first_four<<<1, 2>>>(x, sums);
  say("first_four");
  halve<<<1, 2>>>(sums);
  say("halve");
  std::printf("the end    %s\n", cudaGetErrorString(cudaDeviceSynchronize()));
  return 0;
}
