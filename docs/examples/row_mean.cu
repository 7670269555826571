// A row's mean that is read before it is there: thread 0 computes it, and nothing makes the others wait.
//
//   kernel-fusion simt docs/examples/row_mean.cu                         right: thread 0 comes first
//   kernel-fusion simt --schedule reverse docs/examples/row_mean.cu      wrong: it comes last
#include <cuda_runtime.h>

#include <cstdio>

constexpr int kWidth = 128;

__global__ void subtract_mean(const float* x, float* y) {
  __shared__ float mean;
  if (threadIdx.x == 0) {
    float sum = 0;
    for (int c = 0; c < kWidth; ++c) sum += x[c];
    mean = sum / kWidth;
  }
#ifdef MENDED
  __syncthreads();
#endif
  y[threadIdx.x] = x[threadIdx.x] - mean;
}

int main() {
  float *x, *y;
  cudaMallocManaged(&x, kWidth * sizeof(float));
  cudaMallocManaged(&y, kWidth * sizeof(float));
  for (int c = 0; c < kWidth; ++c) x[c] = c;
  subtract_mean<<<1, kWidth>>>(x, y);
  if (cudaDeviceSynchronize() != cudaSuccess) return 1;
  std::printf("columns 0, 1, 126, 127: %g %g %g %g\n", y[0], y[1], y[126], y[127]);
  return 0;
}
