// What this step's tests of kernels without torch have in common.
#pragma once

#include <cmath>
#include <vector>

#include "layer_test.h"  // step 2's

namespace kf::KF_BACKEND {

constexpr double kEps = 1e-5;

inline std::vector<double> layer_norm_of(std::vector<double> x, const std::vector<float>& weight,
                                         const std::vector<float>& bias) {
  const size_t width = weight.size();
  for (size_t row = 0; row < x.size(); row += width) {
    double mean = 0, variance = 0;
    for (size_t c = 0; c < width; ++c) mean += x[row + c] / width;
    for (size_t c = 0; c < width; ++c) variance += (x[row + c] - mean) * (x[row + c] - mean) / width;
    for (size_t c = 0; c < width; ++c)
      x[row + c] = (x[row + c] - mean) / std::sqrt(variance + kEps) * weight[c] + bias[c];
  }
  return x;
}

}  // namespace kf::KF_BACKEND
