// This stage's ops on torch tensors; pybind.cpp registers them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kf::step2 {

at::Tensor softmax(const at::Tensor& x, std::string_view rung);
at::Tensor& softmax_out(const at::Tensor& x, std::string_view rung, at::Tensor& out);
at::Tensor softmax_autocast(const at::Tensor& x, std::string_view rung);

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                     std::optional<double> scale, std::string_view rung);
at::Tensor& attention_out(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                          std::optional<double> scale, std::string_view rung, at::Tensor& out);
at::Tensor attention_autocast(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                              std::optional<double> scale, std::string_view rung);

// The names an op accepts as `rung`, in the order of the lesson.
std::vector<std::string> rungs(const std::string& op, bool on_gpu);

}  // namespace kf::step2
