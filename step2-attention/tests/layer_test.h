// What the tests of kernels without torch have in common: memory of the GPU's, numbers, and comparisons.
#pragma once

#include <gtest/gtest.h>
#include <kf/launch.h>
#include <kf/rung.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "device_array.h"  // step 1's

namespace kf::KF_BACKEND {

using DeviceVector = DeviceArray<float>;

template <class Args>
void launch(const Rung<Args>& rung, Args args) {
  ASSERT_EQ(rung.can_implement(args), "") << rung.name;
  const DeviceVector scratch(rung.scratch_bytes ? rung.scratch_bytes(args) / sizeof(float) + 1 : 1);
  args.scratch = rung.scratch_bytes ? scratch.data() : nullptr;
  rung.launch(args, nullptr);
}

// A matrix in the GPU's memory, of float or bfloat16; its values fit into both.
class Matrix {
 public:
  Matrix(const std::vector<float>& values, DType dtype) : size_(size_of(dtype)), memory_(packed(values)) {}
  Matrix(int64_t n, DType dtype) : Matrix(std::vector<float>(n, std::numeric_limits<float>::quiet_NaN()), dtype) {}
  void* data() const { return memory_.data(); }
  std::vector<float> values() const {
    const std::vector<unsigned char> bytes = memory_.values();
    std::vector<float> values(bytes.size() / size_);
    for (size_t i = 0; i < values.size(); ++i) std::memcpy(end_of(values[i]), &bytes[i * size_], size_);
    return values;
  }

 private:
  // A float's last bytes are its first digits: two are the bfloat16.
  unsigned char* end_of(float& value) const { return reinterpret_cast<unsigned char*>(&value + 1) - size_; }
  std::vector<unsigned char> packed(std::vector<float> values) const {
    std::vector<unsigned char> bytes(values.size() * size_);
    for (size_t i = 0; i < values.size(); ++i) std::memcpy(&bytes[i * size_], end_of(values[i]), size_);
    return bytes;
  }

  int64_t size_;
  DeviceArray<unsigned char> memory_;
};

// Multiples of 1/8 from −1 on: exact in bfloat16.
inline std::vector<float> eighths(size_t n, int step) {
  std::vector<float> values(n);
  for (size_t i = 0; i < n; ++i) values[i] = 0.125f * static_cast<float>(i * step % 17) - 1;
  return values;
}

inline void expect_close(const Matrix& got, const std::vector<double>& expected, double tolerance,
                         const std::string& what) {
  const std::vector<float> values = got.values();
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_NEAR(values[i], expected[i], tolerance * (1 + std::abs(expected[i]))) << what << ", element " << i;
  }
}

// x, weight and bias of a layer, and what comes of them.
struct Layer {
  int64_t rows, depth, width;
  bool x_transposed, weight_transposed;
  std::vector<float> x, weight, bias;

  Layer(int64_t rows, int64_t depth, int64_t width, bool x_transposed, bool weight_transposed)
      : rows(rows),
        depth(depth),
        width(width),
        x_transposed(x_transposed),
        weight_transposed(weight_transposed),
        x(eighths(rows * depth, 7919)),
        weight(eighths(depth * width, 6101)),
        bias(eighths(width, 5)) {}

  // change(x) · weight + bias
  std::vector<double> product(const std::function<double(int64_t row, int64_t k, double x)>& change) const {
    std::vector<double> y(rows * width);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t k = 0; k < depth; ++k) {
        const double value = change(r, k, x[x_transposed ? k * rows + r : r * depth + k]);
        for (int64_t c = 0; c < width; ++c)
          y[r * width + c] += value * weight[weight_transposed ? c * depth + k : k * width + c];
      }
    }
    for (int64_t i = 0; i < rows * width; ++i) y[i] += bias[i % width];
    return y;
  }
  std::vector<double> product() const {
    return product([](int64_t, int64_t, double value) { return value; });
  }

  std::string text() const {
    return " rows=" + std::to_string(rows) + " depth=" + std::to_string(depth) + " width=" + std::to_string(width) +
           (x_transposed ? " x transposed" : "") + (weight_transposed ? " weight transposed" : "");
  }

  // The sizes of a rung's arguments.
  template <class Args>
  Args args(DType dtype) const {
    Args a{};
    a.rows = rows;
    a.depth = depth;
    a.width = width;
    a.weight_transposed = weight_transposed;
    a.dtype = dtype;
    return a;
  }
};

constexpr double kExact = 2e-5, kRounded = 0.04;  // the latter of sums of 320 products, some of rounded factors

inline double tolerance_of(DType dtype) { return dtype == DType::kFloat32 ? kExact : kRounded; }

}  // namespace kf::KF_BACKEND
