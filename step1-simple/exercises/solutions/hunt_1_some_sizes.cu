// Bug hunt 1: y[i] = factor * x[i] by 128-bit loads. Most sizes are right. Which are not, and why?
//
//   kernel-fusion learn check hunt_1_some_sizes
//   kernel-fusion simt exercises/solutions/hunt_1_some_sizes.cu
//   nvcc -O3 exercises/solutions/hunt_1_some_sizes.cu && ./a.out        with a GPU
#include <cuda_runtime.h>

#include <algorithm>
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

// The first n / 4 threads do four elements each, and the n % 4 threads after them do one each.
__global__ void scale(const float* x, float* y, int n, float factor) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const int vectors = n / 4;
  if (i < vectors) {
    const float4 v = reinterpret_cast<const float4*>(x)[i];
    reinterpret_cast<float4*>(y)[i] = make_float4(factor * v.x, factor * v.y, factor * v.z, factor * v.w);
  } else if (i < vectors + n % 4) {
    const int j = 4 * vectors + (i - vectors);
    y[j] = factor * x[j];
  }
}

void scale_on_gpu(const float* x, float* y, int n, float factor) {
  const int threads = 256;
  // SOLUTION
  // | const int work = std::max(n / 4, 1);
  const int work = n / 4 + n % 4;
  // END
  scale<<<(work + threads - 1) / threads, threads>>>(x, y, n, factor);
  CHECK(cudaGetLastError());
}

bool right(int n) {
  const float factor = 2.5f;
  std::vector<float> x(n), y(n);
  for (int i = 0; i < n; ++i) x[i] = static_cast<float>(i % 1000 - 500);
  float *gpu_x, *gpu_y;
  CHECK(cudaMalloc(&gpu_x, n * sizeof(float)));
  CHECK(cudaMalloc(&gpu_y, n * sizeof(float)));
  CHECK(cudaMemcpy(gpu_x, x.data(), n * sizeof(float), cudaMemcpyHostToDevice));
  CHECK(cudaMemset(gpu_y, 0xff, n * sizeof(float)));  // NaN: an element that nobody writes will show
  scale_on_gpu(gpu_x, gpu_y, n, factor);
  CHECK(cudaMemcpy(y.data(), gpu_y, n * sizeof(float), cudaMemcpyDeviceToHost));
  CHECK(cudaFree(gpu_x));
  CHECK(cudaFree(gpu_y));

  int wrong = 0, first = 0;
  for (int i = n - 1; i >= 0; --i) {
    if (y[i] == factor * x[i]) continue;
    first = i;
    ++wrong;
  }
  if (wrong == 0) return std::printf("n = %6d: right\n", n), true;
  std::printf("n = %6d: WRONG: %d elements, the first is y[%d] = %g, must be %g\n", n, wrong, first, y[first],
              factor * x[first]);
  return false;
}

int main() {
  bool all = true;
  for (const int n : {1, 4, 7, 256, 1000, 1003, 1022, 1024, 1026, 2048, 2051, 5000, 10240, 10241, 100003}) {
    all &= right(n);
  }
  std::printf(all ? "all right\n"
                  : "Hint: how many threads are there for each n that is wrong, and how many are needed?\n");
  return all ? 0 : 1;
}
