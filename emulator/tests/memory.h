// Memory that kernels and tests both see.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <initializer_list>
#include <new>

namespace test {

template <class T>
class Memory {
 public:
  explicit Memory(std::size_t count, T value = T{}) : count_(count) {
    if (cudaMallocManaged(&data_, count * sizeof(T)) != cudaSuccess) throw std::bad_alloc();
    for (std::size_t i = 0; i < count; ++i) data_[i] = value;
  }
  ~Memory() { cudaFree(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  T* get() { return data_; }
  T& operator[](std::size_t i) { return data_[i]; }
  T* begin() { return data_; }
  T* end() { return data_ + count_; }
  std::size_t size() const { return count_; }

 private:
  T* data_ = nullptr;
  std::size_t count_;
};

}  // namespace test
