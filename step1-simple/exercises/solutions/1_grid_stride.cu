// Exercise 1: out[i] = factor * x[i] + y[i] by a grid of any size, with fewer threads than elements or with more.
//
//   kernel-fusion learn check 1_grid_stride
//   kernel-fusion simt exercises/solutions/1_grid_stride.cu
//   nvcc -O3 exercises/solutions/1_grid_stride.cu && ./a.out        with a GPU
//
// Counted: global load requests, global load sectors
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

__global__ void axpy(const float* x, const float* y, float* out, int n, float factor) {
  // SOLUTION: begin at this thread's own element, and go on by as many elements as the grid has threads
  const int threads = gridDim.x * blockDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += threads) out[i] = factor * x[i] + y[i];
  // END
}

constexpr int kGuard = 64;  // numbers behind the end of the output; they must stay NaN

// Runs the kernel once, and compares. All values are small multiples of 1/4, so the results are exact.
bool right(int n, int blocks, int threads) {
  const float factor = 2.5f;
  std::vector<float> x(n), y(n), out(n + kGuard);
  for (int i = 0; i < n; ++i) {
    x[i] = static_cast<float>(i % 1000 - 500);
    y[i] = 0.5f * (i % 77);
  }
  float *gpu_x, *gpu_y, *gpu_out;
  CHECK(cudaMalloc(&gpu_x, n * sizeof(float)));
  CHECK(cudaMalloc(&gpu_y, n * sizeof(float)));
  CHECK(cudaMalloc(&gpu_out, out.size() * sizeof(float)));
  CHECK(cudaMemcpy(gpu_x, x.data(), n * sizeof(float), cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(gpu_y, y.data(), n * sizeof(float), cudaMemcpyHostToDevice));
  CHECK(cudaMemset(gpu_out, 0xff, out.size() * sizeof(float)));  // NaN: an element that nobody writes will show

  axpy<<<blocks, threads>>>(gpu_x, gpu_y, gpu_out, n, factor);
  CHECK(cudaGetLastError());
  CHECK(cudaMemcpy(out.data(), gpu_out, out.size() * sizeof(float), cudaMemcpyDeviceToHost));
  CHECK(cudaFree(gpu_x));
  CHECK(cudaFree(gpu_y));
  CHECK(cudaFree(gpu_out));

  for (int i = 0; i < n; ++i) {
    const float expected = factor * x[i] + y[i];
    if (!(out[i] == expected)) {  // not `!=`: NaN must count as wrong
      std::printf("WRONG: n = %d, %d blocks of %d threads: out[%d] is %g, must be %g%s\n", n, blocks, threads, i,
                  out[i], expected, std::isnan(out[i]) ? "; nobody wrote it" : "");
      return false;
    }
  }
  for (int i = n; i < n + kGuard; ++i) {
    if (!std::isnan(out[i])) {
      std::printf("WRONG: n = %d, %d blocks of %d threads: out[%d] was written, past the end\n", n, blocks, threads, i);
      return false;
    }
  }
  return true;
}

int main() {
  for (const int n : {1, 31, 256, 1003, 5003}) {
    for (const int blocks : {1, 3, 24}) {
      for (const int threads : {32, 256}) {
        if (!right(n, blocks, threads)) return 1;
      }
    }
  }
  std::printf("all right\n");
  return 0;
}
