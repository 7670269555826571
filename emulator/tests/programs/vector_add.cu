// c = a + b, a thread an element: the program of every first lesson.
#include <cuda_runtime.h>

#include <stdio.h>
#include <stdlib.h>

#define CHECK(call)                                                                              \
  do {                                                                                           \
    cudaError_t err = (call);                                                                    \
    if (err != cudaSuccess) {                                                                    \
      fprintf(stderr, "CUDA error at %s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(err)); \
      exit(EXIT_FAILURE);                                                                        \
    }                                                                                            \
  } while (0)

__global__ void vectorAdd(const float* A, const float* B, float* C, int numElements) {
  int i = blockDim.x * blockIdx.x + threadIdx.x;
  if (i < numElements) {
    C[i] = A[i] + B[i];
  }
}

int main(int argc, char** argv) {
  int numElements = argc > 1 ? atoi(argv[1]) : 50000;
  size_t size = numElements * sizeof(float);
  printf("[Vector addition of %d elements]\n", numElements);

  float* h_A = (float*)malloc(size);
  float* h_B = (float*)malloc(size);
  float* h_C = (float*)malloc(size);
  for (int i = 0; i < numElements; ++i) {
    h_A[i] = (float)(i % 1000) * 0.5f;
    h_B[i] = (float)((i * 7) % 501);
  }

  float* d_A = NULL;
  float* d_B = NULL;
  float* d_C = NULL;
  CHECK(cudaMalloc((void**)&d_A, size));
  CHECK(cudaMalloc((void**)&d_B, size));
  CHECK(cudaMalloc((void**)&d_C, size));
  CHECK(cudaMemcpy(d_A, h_A, size, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(d_B, h_B, size, cudaMemcpyHostToDevice));

  int threadsPerBlock = 256;
  int blocksPerGrid = (numElements + threadsPerBlock - 1) / threadsPerBlock;
  printf("CUDA kernel launch with %d blocks of %d threads\n", blocksPerGrid, threadsPerBlock);
  vectorAdd<<<blocksPerGrid, threadsPerBlock>>>(d_A, d_B, d_C, numElements);
  CHECK(cudaGetLastError());
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMemcpy(h_C, d_C, size, cudaMemcpyDeviceToHost));

  double sum = 0;
  for (int i = 0; i < numElements; ++i) {
    if (h_A[i] + h_B[i] != h_C[i]) {
      fprintf(stderr, "Result verification failed at element %d!\n", i);
      exit(EXIT_FAILURE);
    }
    sum += h_C[i];
  }
  for (int i = 0; i < numElements; i += numElements / 5) printf("C[%d] = %.1f\n", i, h_C[i]);
  printf("sum %.1f\nTest PASSED\n", sum);

  CHECK(cudaFree(d_A));
  CHECK(cudaFree(d_B));
  CHECK(cudaFree(d_C));
  free(h_A);
  free(h_B);
  free(h_C);
  return 0;
}
