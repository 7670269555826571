// Exercise 2: y[i] = factor * x[i], four numbers by one 128-bit load and one 128-bit store wherever that is possible.
//
//   kernel-fusion learn check 2_vector_loads
//   kernel-fusion simt exercises/solutions/2_vector_loads.cu
//   nvcc -O3 exercises/solutions/2_vector_loads.cu && ./a.out        with a GPU
//
// Counted: global load requests, global store requests
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
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

__device__ int vector_moves, misaligned_moves;  // counted for the check

__device__ bool is_aligned(const float* p) {
  atomicAdd(&vector_moves, 1);
  if (reinterpret_cast<uintptr_t>(p) % 16 == 0) return true;
  atomicAdd(&misaligned_moves, 1);  // without this helper, a GPU would end the launch with an error
  return false;
}

// Four neighbours at once. `p` must be a multiple of 16 bytes.
__device__ float4 load4(const float* p) {
  return is_aligned(p) ? *reinterpret_cast<const float4*>(p) : make_float4(0, 0, 0, 0);
}
__device__ void store4(float* p, float4 v) {
  if (is_aligned(p)) *reinterpret_cast<float4*>(p) = v;
}

// x and y are equally far from a multiple of 16 bytes: by 0, 4, 8 or 12.
__global__ void scale(const float* x, float* y, int n, float factor) {
  const int thread = blockIdx.x * blockDim.x + threadIdx.x;
  const int threads = gridDim.x * blockDim.x;  // at least four
  // SOLUTION: one by one up to the first multiple of 16 bytes; from there by load4 and store4; the rest one by one
  // | for (int i = thread; i < n; i += threads) y[i] = factor * x[i];
  const int to_multiple = static_cast<int>((16 - reinterpret_cast<uintptr_t>(x) % 16) % 16 / sizeof(float));
  const int head = min(n, to_multiple);
  const int vectors = (n - head) / 4;
  const int tail = head + 4 * vectors;
  if (thread < head) y[thread] = factor * x[thread];
  for (int v = thread; v < vectors; v += threads) {
    const float4 a = load4(x + head + 4 * v);
    store4(y + head + 4 * v, make_float4(factor * a.x, factor * a.y, factor * a.z, factor * a.w));
  }
  if (thread < n - tail) y[tail + thread] = factor * x[tail + thread];
  // END
}

// Runs the kernel once on n numbers that begin `offset` numbers after a multiple of 16 bytes.
bool right(int n, int offset) {
  const float factor = 2.5f;
  std::vector<float> x(n + 8), y(n + 8);  // up to three numbers before the n, at least five behind
  for (int i = 0; i < n + 8; ++i) x[i] = static_cast<float>(i % 1000 - 500);
  const size_t bytes = x.size() * sizeof(float);
  float *gpu_x, *gpu_y;
  CHECK(cudaMalloc(&gpu_x, bytes));
  CHECK(cudaMalloc(&gpu_y, bytes));
  CHECK(cudaMemcpy(gpu_x, x.data(), bytes, cudaMemcpyHostToDevice));
  CHECK(cudaMemset(gpu_y, 0xff, bytes));  // NaN: an element that nobody writes will show
  const int zero = 0;
  CHECK(cudaMemcpyToSymbol(vector_moves, &zero, sizeof(int)));
  CHECK(cudaMemcpyToSymbol(misaligned_moves, &zero, sizeof(int)));

  scale<<<3, 64>>>(gpu_x + offset, gpu_y + offset, n, factor);
  CHECK(cudaGetLastError());
  int moves, misaligned;
  CHECK(cudaMemcpy(y.data(), gpu_y, bytes, cudaMemcpyDeviceToHost));
  CHECK(cudaMemcpyFromSymbol(&moves, vector_moves, sizeof(int)));
  CHECK(cudaMemcpyFromSymbol(&misaligned, misaligned_moves, sizeof(int)));
  CHECK(cudaFree(gpu_x));
  CHECK(cudaFree(gpu_y));

  std::printf("n = %d, x %d bytes after a multiple of 16: ", n, 4 * offset);
  if (misaligned != 0) return std::printf("WRONG: %d addresses were no multiple of 16\n", misaligned), false;
  for (int i = -offset; i < n + 8 - offset; ++i) {
    const float got = y[i + offset], expected = factor * x[i + offset];
    if (i < 0 || i >= n) {
      if (!std::isnan(got)) return std::printf("WRONG: y[%d] was written, outside of the n\n", i), false;
    } else if (!(got == expected)) {  // not `!=`: NaN must count as wrong
      return std::printf("WRONG: y[%d] is %g, must be %g\n", i, got, expected), false;
    }
  }
  const int wanted = 2 * ((n - std::min(n, (4 - offset) % 4)) / 4);
  if (moves != wanted) return std::printf("WRONG: %d calls of load4 and store4, must be %d\n", moves, wanted), false;
  std::printf("right\n");
  return true;
}

int main() {
  for (const int n : {1, 2, 4, 7, 256, 1023, 20001}) {
    for (int offset = 0; offset < 4; ++offset) {
      if (!right(n, offset)) return 1;
    }
  }
  std::printf("all right\n");
  return 0;
}
