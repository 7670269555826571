// A row that knows its columns is copied to the GPU, but its columns are not: they are the host's memory.
//
//   kernel-fusion simt docs/examples/two_memories.cu         "an illegal memory access", with the pointer's line
#include <cuda_runtime.h>

#include <cstdio>
#include <vector>

struct Row {
  const float* columns;
  int count;
};

__global__ void sum_row(const Row* row, float* sum) {
  *sum = 0;
  for (int c = 0; c < row->count; ++c) *sum += row->columns[c];
}

int main() {
  const std::vector<float> ones(100, 1.0f);
  Row row{ones.data(), 100};
#ifdef MENDED
  float* columns;
  cudaMalloc(&columns, ones.size() * sizeof(float));
  cudaMemcpy(columns, ones.data(), ones.size() * sizeof(float), cudaMemcpyHostToDevice);
  row.columns = columns;
#endif
  Row* on_gpu;
  cudaMalloc(&on_gpu, sizeof(Row));
  cudaMemcpy(on_gpu, &row, sizeof(Row), cudaMemcpyHostToDevice);
  float* sum;
  cudaMallocManaged(&sum, sizeof(float));
  sum_row<<<1, 1>>>(on_gpu, sum);
  const cudaError_t error = cudaDeviceSynchronize();
  if (error != cudaSuccess) std::printf("sum_row: %s\n", cudaGetErrorString(error));
  if (error == cudaSuccess) std::printf("the sum of %d ones: %g\n", row.count, *sum);
  return error == cudaSuccess ? 0 : 1;
}
