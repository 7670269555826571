// Exercise 3: y = residual + gelu(x + bias) in one launch instead of three.
//
//   kernel-fusion learn check 3_fuse
//   kernel-fusion simt exercises/solutions/3_fuse.cu
//   nvcc -O3 exercises/solutions/3_fuse.cu && ./a.out        with a GPU
//
// Counted: launches, global load sectors, global store sectors
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                                       \
  do {                                                                                    \
    const cudaError_t error = (call);                                                     \
    if (error != cudaSuccess) {                                                           \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error)); \
      std::exit(1);                                                                       \
    }                                                                                     \
  } while (0)

__device__ float gelu(float v) { return 0.5f * v * (1.f + tanhf(0.7978845608f * (v + 0.044715f * v * v * v))); }

// The three kernels of the separate way. Each thread does one element; row after row of `width` elements.
__global__ void add_bias(const float* x, const float* bias, float* y, int width, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] + bias[i % width];  // reads n, writes n
}
__global__ void apply_gelu(float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = gelu(y[i]);  // reads n, writes n
}
__global__ void add_residual(const float* residual, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = residual[i] + y[i];  // reads 2·n, writes n
}

// SOLUTION: write the fused kernel: it reads x, bias and residual once, and writes y once
__global__ void fused(const float* x, const float* bias, const float* residual, float* y, int width, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = residual[i] + gelu(x[i] + bias[i % width]);
}
// END

int launches = 0;

// Every launch of this program, so that they can be counted: a thread for each of n elements.
template <class Kernel, class... Arguments>
void launch(Kernel kernel, int n, Arguments... arguments) {
  ++launches;
  kernel<<<(n + 255) / 256, 256>>>(arguments..., n);
  CHECK(cudaGetLastError());
}

void compute(const float* x, const float* bias, const float* residual, float* y, int width, int n) {
  // SOLUTION: launch the fused kernel instead of these
  // | launch(add_bias, n, x, bias, y, width);
  // | launch(apply_gelu, n, y);
  // | launch(add_residual, n, residual, y);
  launch(fused, n, x, bias, residual, y, width);
  // END
}

float* on_gpu(const std::vector<float>& numbers) {
  float* copy;
  CHECK(cudaMalloc(&copy, numbers.size() * sizeof(float)));
  CHECK(cudaMemcpy(copy, numbers.data(), numbers.size() * sizeof(float), cudaMemcpyHostToDevice));
  return copy;
}

bool right(int rows, int width) {
  const int n = rows * width;
  std::vector<float> x(n), bias(width), residual(n), y(n, NAN);  // NaN: an element that nobody writes will show
  for (int i = 0; i < n; ++i) x[i] = 0.01f * (i % 997 - 500), residual[i] = 0.1f * (i % 31);
  for (int c = 0; c < width; ++c) bias[c] = 0.05f * (c % 41 - 20);
  float *gpu_x = on_gpu(x), *gpu_bias = on_gpu(bias), *gpu_residual = on_gpu(residual), *gpu_y = on_gpu(y);

  launches = 0;
  compute(gpu_x, gpu_bias, gpu_residual, gpu_y, width, n);
  CHECK(cudaMemcpy(y.data(), gpu_y, n * sizeof(float), cudaMemcpyDeviceToHost));
  for (float* memory : {gpu_x, gpu_bias, gpu_residual, gpu_y}) CHECK(cudaFree(memory));

  for (int i = 0; i < n; ++i) {
    const double v = double{x[i]} + bias[i % width];
    const double expected = residual[i] + 0.5 * v * (1 + std::tanh(0.7978845608 * (v + 0.044715 * v * v * v)));
    if (!(std::fabs(y[i] - expected) <= 2e-6 * (1 + std::fabs(expected)))) {  // not `>`: NaN must count as wrong
      std::printf("WRONG: %d rows of %d: y[%d] is %g, must be %g\n", rows, width, i, y[i], expected);
      return false;
    }
  }
  if (launches != 1) {
    std::printf("WRONG: the results are right, but it took %d launches; one is enough\n", launches);
    return false;
  }
  return true;
}

int main() {
  if (!right(1, 1) || !right(3, 33) || !right(7, 256) || !right(41, 1001)) return 1;
  std::printf("three launches move 28 bytes an element, one moves 12\nall right\n");
  return 0;
}
