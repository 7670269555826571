// Bug hunt 2: every row divided by its sum, a block a row. It is right in one order of the threads, wrong in others.
//
//   kernel-fusion learn check hunt_2_some_orders
//   kernel-fusion simt exercises/solutions/hunt_2_some_orders.cu
//   KF_SIMT_SCHEDULE=random:1 kernel-fusion simt exercises/solutions/hunt_2_some_orders.cu
//   nvcc -lineinfo exercises/solutions/hunt_2_some_orders.cu && compute-sanitizer --tool racecheck ./a.out  with a GPU
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

constexpr int kThreads = 128;

__global__ void divide_by_sum(const float* x, float* y, int width) {
  __shared__ float sum_of_warp[kThreads / 32];
  __shared__ float sum_of_row;
  const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  float sum = 0;
  for (int c = threadIdx.x; c < width; c += kThreads) sum += x[row * width + c];
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_down_sync(0xffffffffu, sum, distance);
  if (lane == 0) sum_of_warp[warp] = sum;
  __syncthreads();

  if (threadIdx.x == 0) {
    float total = 0;
    for (int w = 0; w < kThreads / 32; ++w) total += sum_of_warp[w];
    sum_of_row = total;
  }
  // SOLUTION
  __syncthreads();
  // END
  for (int c = threadIdx.x; c < width; c += kThreads) y[row * width + c] = x[row * width + c] / sum_of_row;
}

bool right(int rows, int width) {
  const int n = rows * width;
  std::vector<float> x(n), y(n);
  std::vector<double> sums(rows);
  for (int i = 0; i < n; ++i) {
    x[i] = 1 + i % 13;
    sums[i / width] += x[i];
  }
  float *gpu_x, *gpu_y;
  CHECK(cudaMalloc(&gpu_x, n * sizeof(float)));
  CHECK(cudaMalloc(&gpu_y, n * sizeof(float)));
  CHECK(cudaMemcpy(gpu_x, x.data(), n * sizeof(float), cudaMemcpyHostToDevice));
  CHECK(cudaMemset(gpu_y, 0xff, n * sizeof(float)));  // NaN: an element that nobody writes will show
  divide_by_sum<<<rows, kThreads>>>(gpu_x, gpu_y, width);
  CHECK(cudaGetLastError());
  CHECK(cudaMemcpy(y.data(), gpu_y, n * sizeof(float), cudaMemcpyDeviceToHost));
  CHECK(cudaFree(gpu_x));
  CHECK(cudaFree(gpu_y));

  for (int i = 0; i < n; ++i) {
    const double expected = x[i] / sums[i / width];
    if (!(std::fabs(y[i] - expected) <= 1e-6 * expected)) {  // not `>`: NaN must count as wrong
      std::printf("WRONG: %d rows of %d: row %d, column %d is %g, must be %g\n", rows, width, i / width, i % width,
                  y[i], expected);
      return false;
    }
  }
  return true;
}

int main() {
  for (const int width : {1, 31, 128, 1001}) {
    for (const int rows : {1, 7, 64}) {
      if (right(rows, width)) continue;
      std::printf("Hint: which thread writes the number that the others divide by, and when may they read it?\n");
      return 1;
    }
  }
  std::printf("all right\n");
  return 0;
}
