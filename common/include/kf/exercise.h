// What the programs of the exercises share: errors of the runtime end the program, and memory on the GPU has an owner.
#pragma once

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

// A copy on the GPU, which is freed where it goes out of scope.
template <class T>
struct OnGpu {
  T* data;
  size_t bytes;
  explicit OnGpu(const std::vector<T>& from) : bytes(from.size() * sizeof(T)) {
    CHECK(cudaMalloc(&data, bytes));
    CHECK(cudaMemcpy(data, from.data(), bytes, cudaMemcpyHostToDevice));
  }
  ~OnGpu() { CHECK(cudaFree(data)); }
  void read(std::vector<T>& to) const { CHECK(cudaMemcpy(to.data(), data, bytes, cudaMemcpyDeviceToHost)); }
};
