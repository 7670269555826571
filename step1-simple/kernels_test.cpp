// Every rung of this stage in float32, against a plain loop in double; without torch, so that a sanitizer or a debugger
// sees nothing but the kernels. Presets in the root's CMakeLists.txt: simt, simt-asan, cuda.
#include <gtest/gtest.h>
#include <kf/launch.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kernels/bias_gelu/rungs.h"
#include "kernels/scale/rungs.h"

namespace kf::KF_BACKEND {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// `values` in the GPU's memory, with not a byte more, so that a sanitizer finds what lies one past the end.
class DeviceVector {
 public:
  explicit DeviceVector(const std::vector<float>& values) : size_(values.size()) {
    check(cudaMalloc(&data_, size_ * sizeof(float)), "cudaMalloc");
    check(cudaMemcpy(data_, values.data(), size_ * sizeof(float), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  DeviceVector(const DeviceVector&) = delete;
  ~DeviceVector() { cudaFree(data_); }
  void* data() const { return data_; }
  std::vector<float> values() const {
    std::vector<float> copy(size_);
    check(cudaMemcpy(copy.data(), data_, size_ * sizeof(float), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return copy;
  }

 private:
  size_t size_;
  void* data_ = nullptr;
};

std::vector<float> numbers(size_t n) {
  std::vector<float> values(n);
  for (size_t i = 0; i < n; ++i) values[i] = 0.37f * static_cast<float>(i * 7919 % 23) - 4.0f;
  return values;
}

void expect_near(const std::vector<float>& got, const std::function<double(size_t)>& expected,
                 const std::string& what) {
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected(i), 1e-5) << what << ", element " << i;
}

TEST(Scale, EveryRungMultiplies) {
  for (const auto& rung : scale::rungs()) {
    for (const size_t n : {1, 3, 4, 31, 33, 127, 256, 1023, 1600}) {
      const std::vector<float> x = numbers(n);
      const DeviceVector device_x(x), y(std::vector<float>(n, kNaN));
      rung.launch({device_x.data(), y.data(), static_cast<int64_t>(n), -1.5, DType::kFloat32}, nullptr);
      expect_near(y.values(), [&](size_t i) { return -1.5 * x[i]; }, rung.name + (" n=" + std::to_string(n)));
    }
  }
}

TEST(BiasGelu, EveryRungIsGeluOfTheSum) {
  constexpr size_t kRows = 5;
  for (const auto& rung : bias_gelu::rungs()) {
    for (const size_t width : {1, 2, 31, 64, 127, 760}) {
      for (const bool tanh : {true, false}) {
        const std::vector<float> x = numbers(kRows * width), bias = numbers(width);
        const DeviceVector device_x(x), device_bias(bias), y(std::vector<float>(x.size(), kNaN));
        rung.launch(
            {device_x.data(), device_bias.data(), y.data(), kRows, static_cast<int64_t>(width), tanh, DType::kFloat32},
            nullptr);
        const auto gelu = [&](size_t i) {
          const double s = double{x[i]} + bias[i % width];
          if (tanh) return s / 2 * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (s + 0.044715 * s * s * s)));
          return s / 2 * std::erfc(-s / std::sqrt(2.0));
        };
        expect_near(y.values(), gelu, rung.name + (" width=" + std::to_string(width)));
      }
    }
  }
}

}  // namespace
}  // namespace kf::KF_BACKEND
