// Heat on a plate: a five-point stencil with its weights in constant memory, a tile with a halo, and two grids in turn.
// Weights and start values are eighths, so that a few steps are exact in double.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#define CUDA_CALL(x)                                                                              \
  do {                                                                                            \
    if ((x) != cudaSuccess) {                                                                     \
      printf("Error at %s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(cudaGetLastError())); \
      return EXIT_FAILURE;                                                                        \
    }                                                                                             \
  } while (0)

#define TILE 14
#define BLOCK (TILE + 2)

__constant__ double weights[2];  // of the middle and of a neighbour
__device__ unsigned long long updates;

__global__ void __launch_bounds__(BLOCK* BLOCK)
    step(const double* __restrict__ from, double* __restrict__ to, int width, int height) {
  __shared__ double tile[BLOCK][BLOCK];
  const int x = blockIdx.x * TILE + threadIdx.x - 1, y = blockIdx.y * TILE + threadIdx.y - 1;
  const bool inside = x >= 0 && x < width && y >= 0 && y < height;
  tile[threadIdx.y][threadIdx.x] = inside ? from[y * width + x] : 0;
  __syncthreads();
  if (!inside || threadIdx.x == 0 || threadIdx.x == BLOCK - 1 || threadIdx.y == 0 || threadIdx.y == BLOCK - 1) return;
  double sum = weights[0] * tile[threadIdx.y][threadIdx.x];
  sum += weights[1] * (tile[threadIdx.y][threadIdx.x - 1] + tile[threadIdx.y][threadIdx.x + 1] +
                       tile[threadIdx.y - 1][threadIdx.x] + tile[threadIdx.y + 1][threadIdx.x]);
  to[y * width + x] = sum;
  atomicAdd(&updates, 1ULL);
}

int main() {
  const int width = 75, height = 41, steps = 5;
  const size_t n = width * height;
  const double host_weights[2] = {0.5, 0.125};
  std::vector<double> start(n), result(n), next(n);
  for (size_t i = 0; i < n; ++i) start[i] = (i * 29 % 64) / 8.0;

  double *a, *b;
  size_t pitch;
  CUDA_CALL(cudaMemcpyToSymbol(weights, host_weights, sizeof(host_weights)));
  CUDA_CALL(cudaMallocPitch(&a, &pitch, n * sizeof(double), 1));
  CUDA_CALL(cudaMalloc((void**)&b, n * sizeof(double)));
  CUDA_CALL(cudaMemcpy(a, start.data(), n * sizeof(double), cudaMemcpyHostToDevice));
  const dim3 threads(BLOCK, BLOCK), blocks((width + TILE - 1) / TILE, (height + TILE - 1) / TILE);
  for (int s = 0; s < steps; ++s) {
    step<<<blocks, threads>>>(a, b, width, height);
    CUDA_CALL(cudaGetLastError());
    std::swap(a, b);
  }
  CUDA_CALL(cudaMemcpy(result.data(), a, n * sizeof(double), cudaMemcpyDeviceToHost));
  unsigned long long count;
  CUDA_CALL(cudaMemcpyFromSymbol(&count, updates, sizeof(count)));

  const auto at = [&](int x, int y) {
    return x < 0 || x >= width || y < 0 || y >= height ? 0.0 : start[y * width + x];
  };
  for (int s = 0; s < steps; ++s) {
    for (int y = 0; y < height; ++y) {
      for (int x = 0; x < width; ++x) {
        next[y * width + x] = 0.5 * at(x, y) + 0.125 * (at(x - 1, y) + at(x + 1, y) + at(x, y - 1) + at(x, y + 1));
      }
    }
    start.swap(next);
  }
  int wrong = 0;
  for (size_t i = 0; i < n; ++i) wrong += !(result[i] == start[i]);
  for (int y = 0; y < height; y += 10)
    printf("row %2d: %.9f %.9f %.9f\n", y, result[y * width], result[y * width + 37], result[y * width + 74]);
  printf("%llu updates, %d wrong\n", count, wrong);
  CUDA_CALL(cudaFree(a));
  CUDA_CALL(cudaFree(b));
  return wrong == 0 && count == n * steps ? EXIT_SUCCESS : EXIT_FAILURE;
}
