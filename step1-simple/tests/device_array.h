// Memory of the GPU's for tests of kernels without torch.
#pragma once

#include <kf/launch.h>

#include <limits>
#include <vector>

namespace kf::KF_BACKEND {

// `values` in the GPU's memory, with not a byte more, so that a sanitizer finds what lies one past the end.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values) : size_(values.size()) {
    check(cudaMalloc(&data_, size_ * sizeof(T)), "cudaMalloc");
    check(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  // Room for n values, NaN until somebody writes them.
  explicit DeviceArray(int64_t n) : DeviceArray(std::vector<T>(n, std::numeric_limits<float>::quiet_NaN())) {}
  DeviceArray(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }
  void* data() const { return data_; }
  T* elements() const { return data_; }
  std::vector<T> values() const {
    std::vector<T> copy(size_);
    check(cudaMemcpy(copy.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return copy;
  }

 private:
  size_t size_;
  T* data_ = nullptr;
};

}  // namespace kf::KF_BACKEND
