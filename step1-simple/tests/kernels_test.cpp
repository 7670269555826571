// Every rung of this step in float32, against a plain loop in double; without torch, so that a sanitizer or a debugger
// sees nothing but the kernels. Presets in the root's CMakeLists.txt: simt, simt-asan, cuda.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/bias_dropout_residual/rungs.h"
#include "kernels/bias_dropout_residual_backward/rungs.h"
#include "kernels/bias_gelu/rungs.h"
#include "kernels/bias_gelu_backward/rungs.h"
#include "kernels/column_sum/rungs.h"
#include "kernels/gelu/rungs.h"
#include "kernels/gelu_backward/rungs.h"
#include "kernels/gelu_scale/rungs.h"
#include "kernels/scale/rungs.h"
#include "tests/device_array.h"

namespace kf::KF_BACKEND {
namespace {

using Floats = DeviceArray<float>;

std::vector<float> numbers(size_t n) {
  std::vector<float> values(n);
  for (size_t i = 0; i < n; ++i) values[i] = 0.37f * static_cast<float>(i * 7919 % 23) - 4.0f;
  return values;
}

using Expected = std::function<double(size_t)>;

void expect_near(const std::vector<float>& got, const Expected& expected, const std::string& what,
                 double allowed = 1e-5) {
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected(i), allowed) << what << ", element " << i;
}

// What the columns of kRows rows add up to.
constexpr size_t kRows = 21;
Expected column_sum_of(Expected element, size_t width) {
  return [element = std::move(element), width](size_t column) {
    double sum = 0;
    for (size_t row = 0; row < kRows; ++row) sum += element(row * width + column);
    return sum;
  };
}

const std::vector<size_t> kSizes = {1, 3, 4, 31, 33, 127, 256, 1023, 1600};
const std::vector<size_t> kWidths = {1, 2, 31, 64, 127, 257, 760};

// Launches a rung, its memory for partial sums full of NaN.
template <class Args>
void launch(const Rung<Args>& rung, Args args) {
  const Floats scratch(rung.scratch_bytes == nullptr ? 1
                                                     : static_cast<size_t>(rung.scratch_bytes(args)) / sizeof(float));
  args.scratch = scratch.data();
  rung.launch(args, nullptr);
}

double gelu_of(double s, bool tanh) {
  if (tanh) return s / 2 * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (s + 0.044715 * s * s * s)));
  return s / 2 * std::erfc(-s / std::sqrt(2.0));
}

double gelu_slope(double s, bool tanh) {
  constexpr double kStep = 1e-5;
  return (gelu_of(s + kStep, tanh) - gelu_of(s - kStep, tanh)) / (2 * kStep);
}

std::string named(const char* rung, size_t size) { return rung + (" of " + std::to_string(size)); }

TEST(Scale, EveryRungMultiplies) {
  for (const auto& rung : scale::rungs()) {
    for (const size_t n : kSizes) {
      const std::vector<float> x = numbers(n);
      const Floats device_x(x), y(n);
      rung.launch({device_x.data(), y.data(), static_cast<int64_t>(n), -1.5, DType::kFloat32}, nullptr);
      expect_near(y.values(), [&](size_t i) { return -1.5 * x[i]; }, named(rung.name, n));
    }
  }
}

TEST(Gelu, EveryRungIsTheFormula) {
  for (const bool tanh : {true, false}) {
    for (const size_t n : kSizes) {
      const std::vector<float> x = numbers(n);
      const Floats device_x(x);
      const auto size = static_cast<int64_t>(n);
      for (const auto& rung : gelu::rungs()) {
        const Floats y(n);
        rung.launch({device_x.data(), y.data(), size, tanh, DType::kFloat32}, nullptr);
        expect_near(y.values(), [&](size_t i) { return gelu_of(x[i], tanh); }, named(rung.name, n));
      }
      for (const auto& rung : gelu_scale::rungs()) {
        const Floats y(n);
        rung.launch({device_x.data(), y.data(), size, -1.5, tanh, DType::kFloat32}, nullptr);
        expect_near(y.values(), [&](size_t i) { return -1.5 * gelu_of(x[i], tanh); }, named(rung.name, n));
      }
      for (const auto& rung : gelu_backward::rungs()) {
        const Floats y(n);  // x stands for the gradient too
        rung.launch({device_x.data(), device_x.data(), y.data(), size, -1.5, tanh, DType::kFloat32}, nullptr);
        expect_near(y.values(), [&](size_t i) { return -1.5 * x[i] * gelu_slope(x[i], tanh); }, named(rung.name, n));
      }
    }
  }
}

TEST(BiasGelu, EveryRungIsGeluOfTheSum) {
  for (const size_t width : kWidths) {
    const std::vector<float> x = numbers(kRows * width), bias = numbers(width);
    const Floats device_x(x), device_bias(bias);
    const auto sum = [&](size_t i) { return double{x[i]} + bias[i % width]; };
    for (const bool tanh : {true, false}) {
      for (const auto& rung : bias_gelu::rungs()) {
        const Floats y(x.size());
        rung.launch(
            {device_x.data(), device_bias.data(), y.data(), kRows, static_cast<int64_t>(width), tanh, DType::kFloat32},
            nullptr);
        expect_near(y.values(), [&](size_t i) { return gelu_of(sum(i), tanh); }, named(rung.name, width));
      }
      for (const auto& rung : bias_gelu_backward::rungs()) {
        const Floats grad_x(x.size()), grad_bias(width);
        bias_gelu_backward::Args args{device_x.data(),  device_x.data(), device_bias.data(),          grad_x.data(),
                                      grad_bias.data(), kRows,           static_cast<int64_t>(width), tanh,
                                      DType::kFloat32};
        launch(rung, args);
        const auto gradient = [&](size_t i) { return x[i] * gelu_slope(sum(i), tanh); };
        expect_near(grad_x.values(), gradient, named(rung.name, width));
        expect_near(grad_bias.values(), column_sum_of(gradient, width), named(rung.name, width), 1e-4);
      }
    }
  }
}

TEST(ColumnSum, EveryRungAddsAllRows) {
  for (const size_t width : kWidths) {
    const std::vector<float> x = numbers(kRows * width);
    const Floats device_x(x);
    for (const auto& rung : column_sum::rungs()) {
      const Floats sum(width);
      column_sum::Args args{device_x.data(), sum.data(), kRows, static_cast<int64_t>(width), DType::kFloat32};
      launch(rung, args);
      const auto element = [&](size_t i) { return double{x[i]}; };
      expect_near(sum.values(), column_sum_of(element, width), named(rung.name, width), 1e-4);
    }
  }
}

// Every rung must drop the same elements, and the right part of them: test_dropout.py has a Philox of its own for that.
TEST(BiasDropoutResidual, EveryRungDropsTheSame) {
  constexpr uint32_t kThreshold = 65536 / 4;
  for (const size_t width : kWidths) {
    const std::vector<float> x = numbers(kRows * width), bias(width, 10.0f), residual = numbers(x.size());
    const Floats device_x(x), device_bias(bias), device_residual(residual);
    const auto columns = static_cast<int64_t>(width);
    std::vector<float> seven_and_four(4);  // two 64-bit numbers, in the memory of four floats
    const int64_t numbers_of_state[] = {7, 4};
    std::memcpy(seven_and_four.data(), numbers_of_state, sizeof numbers_of_state);
    const Floats rng_state(seven_and_four);
    std::vector<bool> kept;
    for (const auto& rung : bias_dropout_residual::rungs()) {
      const Floats y(x.size());
      rung.launch({device_x.data(), device_bias.data(), device_residual.data(), y.data(), kRows, columns, nullptr, 7, 4,
                   kThreshold, DType::kFloat32},
                  nullptr);
      const std::vector<float> got = y.values();
      if (kept.empty()) {
        for (size_t i = 0; i < got.size(); ++i) kept.push_back(got[i] != residual[i]);
      }
      const auto expected = [&](size_t i) {
        return residual[i] + (kept[i] ? (double{x[i]} + bias[i % width]) * 4 / 3 : 0);
      };
      expect_near(got, expected, named(rung.name, width));
      // Under a CUDA graph the kernel finds seed and offset in memory, and must not use those of the launch.
      rung.launch({device_x.data(), device_bias.data(), device_residual.data(), y.data(), kRows, columns,
                   static_cast<const int64_t*>(rng_state.data()), 1, 2, kThreshold, DType::kFloat32},
                  nullptr);
      EXPECT_EQ(y.values(), got) << named(rung.name, width);
    }
    const auto part =
        static_cast<double>(std::count(kept.begin(), kept.end(), true)) / static_cast<double>(kept.size());
    EXPECT_NEAR(part, 0.75, 2.5 / std::sqrt(static_cast<double>(kept.size())));
    for (const auto& rung : bias_dropout_residual_backward::rungs()) {
      const Floats grad_x(x.size()), grad_bias(width);
      bias_dropout_residual_backward::Args args{
          device_x.data(), grad_x.data(), grad_bias.data(), kRows, columns, nullptr, 7, 4, kThreshold, DType::kFloat32};
      launch(rung, args);
      const auto gradient = [&](size_t i) { return kept[i] ? double{x[i]} * 4 / 3 : 0; };
      const std::vector<float> got = grad_x.values();
      expect_near(got, gradient, named(rung.name, width));
      expect_near(grad_bias.values(), column_sum_of(gradient, width), named(rung.name, width), 1e-4);
      args.rng_state = static_cast<const int64_t*>(rng_state.data());
      args.seed = 1, args.offset = 2;
      launch(rung, args);
      EXPECT_EQ(grad_x.values(), got) << named(rung.name, width);
    }
  }
}

}  // namespace
}  // namespace kf::KF_BACKEND
