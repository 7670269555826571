// This stage's ops on torch tensors; pybind.cpp registers them.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <vector>

namespace kf::step1 {

at::Tensor scale(const at::Tensor& x, double factor, std::string_view rung);
at::Tensor& scale_out(const at::Tensor& x, double factor, std::string_view rung, at::Tensor& out);

at::Tensor bias_gelu(const at::Tensor& x, const at::Tensor& bias, std::string_view approximate, std::string_view rung);
at::Tensor& bias_gelu_out(const at::Tensor& x, const at::Tensor& bias, std::string_view approximate,
                          std::string_view rung, at::Tensor& out);

// Under autocast: x and bias in autocast's dtype, then the op.
at::Tensor bias_gelu_autocast(const at::Tensor& x, const at::Tensor& bias, std::string_view approximate,
                              std::string_view rung);

// The names an op accepts as `rung`, in the order of the lesson.
std::vector<std::string> rungs(const std::string& op, bool on_gpu);

}  // namespace kf::step1
