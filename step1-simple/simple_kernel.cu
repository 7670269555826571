// The first CUDA program: y[i] = factor * x[i] for n numbers, on the CPU and then on the GPU.
//
//   nvcc -O3 simple_kernel.cu && ./a.out        with a GPU; then ./a.out 100000000 for more than a million numbers
//   kernel-fusion simt simple_kernel.cu         without one: the same kernel, its threads run by the CPU
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

// Every CUDA call returns an error code. This stops with the line and the reason.
#define CHECK(call)                                                                       \
  do {                                                                                    \
    const cudaError_t error = (call);                                                     \
    if (error != cudaSuccess) {                                                           \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error)); \
      std::exit(1);                                                                       \
    }                                                                                     \
  } while (0)

// The CPU's way: one thread walks over all n elements.
void scale_on_cpu(const float* x, float* y, int n, float factor) {
  for (int i = 0; i < n; ++i) y[i] = factor * x[i];
}

// The GPU's way: n threads, and each runs this function once, for its own i.
__global__ void scale(const float* x, float* y, int n, float factor) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;  // blocks before mine * threads in each + my place in mine
  if (i < n) y[i] = factor * x[i];                      // the last block has more threads than elements are left
}

// Starts enough blocks of `threads` threads for n elements.
void scale_on_gpu(const float* x, float* y, int n, float factor, int threads) {
  const int blocks = (n + threads - 1) / threads;  // n / threads, rounded up
  scale<<<blocks, threads>>>(x, y, n, factor);
  CHECK(cudaGetLastError());  // a launch returns nothing; a refused one is found here
}

int count_wrong(const std::vector<float>& y, const std::vector<float>& expected) {
  int wrong = 0;
  for (size_t i = 0; i < y.size(); ++i) wrong += !(y[i] == expected[i]);  // not `!=`: NaN must count as wrong
  return wrong;
}

int main(int argc, char** argv) {
  const int n = argc > 1 ? std::atoi(argv[1]) : 1000000;
  if (n < 1 || n > 1000000000) {
    std::fprintf(stderr, "n must be from 1 to 1000000000, got %s\n", argv[1]);
    return 1;
  }
  const float factor = 2.5f;
  const size_t bytes = n * sizeof(float);

  // The CPU's memory: input, expected output, and room for what the GPU computes.
  std::vector<float> x(n), expected(n), y(n);
  for (int i = 0; i < n; ++i) x[i] = 0.001f * (i % 2000 - 1000);
  scale_on_cpu(x.data(), expected.data(), n, factor);

  // The GPU has its own memory: make room there, and copy the input over.
  float *gpu_x, *gpu_y;
  CHECK(cudaMalloc(&gpu_x, bytes));
  CHECK(cudaMalloc(&gpu_y, bytes));
  CHECK(cudaMemcpy(gpu_x, x.data(), bytes, cudaMemcpyHostToDevice));

  cudaEvent_t start, stop;  // the GPU's own stopwatch
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&stop));

  std::printf("y = %g * x, %d numbers\n\nthreads a block   blocks   microseconds     GB/s\n", factor, n);
  int wrong = 0;
  for (const int threads : {32, 64, 128, 256, 512, 1024}) {
    CHECK(cudaMemset(gpu_y, 0xff, bytes));  // NaN everywhere: an element that nobody writes will show

    scale_on_gpu(gpu_x, gpu_y, n, factor, threads);  // warm-up: the first launch pays for loading the code
    const int launches = 10;
    CHECK(cudaEventRecord(start));
    for (int k = 0; k < launches; ++k) scale_on_gpu(gpu_x, gpu_y, n, factor, threads);
    CHECK(cudaEventRecord(stop));
    CHECK(cudaEventSynchronize(stop));  // launches return at once; wait for the GPU
    float ms;
    CHECK(cudaEventElapsedTime(&ms, start, stop));
    ms /= launches;

    CHECK(cudaMemcpy(y.data(), gpu_y, bytes, cudaMemcpyDeviceToHost));
    wrong += count_wrong(y, expected);
    const double moved = 2.0 * bytes;  // each element is read once and written once
    std::printf("%15d %8d %14.2f %8.1f\n", threads, (n + threads - 1) / threads, 1e3 * ms, moved / (1e6 * ms));
  }

  std::printf("\n         i        x      GPU expected\n");
  for (long k = 0; k < 10; ++k) {
    const int i = static_cast<int>(k * (n - 1) / 9);  // ten places, the first and the last among them
    std::printf("%10d %8.4f %8.4f %8.4f\n", i, x[i], y[i], expected[i]);
  }

  CHECK(cudaEventDestroy(start));
  CHECK(cudaEventDestroy(stop));
  CHECK(cudaFree(gpu_x));
  CHECK(cudaFree(gpu_y));
  std::printf(wrong == 0 ? "\nall right\n" : "\n%d WRONG\n", wrong);
  return wrong == 0 ? 0 : 1;
}
