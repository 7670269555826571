// This stage's ops on torch tensors; pybind.cpp registers them.
#pragma once

#include <ATen/core/Tensor.h>
#include <kf/host.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

namespace kf::step2 {

at::Tensor softmax(const at::Tensor& x, std::string_view rung);
at::Tensor& softmax_out(const at::Tensor& x, std::string_view rung, at::Tensor& out);
at::Tensor softmax_autocast(const at::Tensor& x, std::string_view rung);

// The output, and the log-sum-exp of each query.
std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                             const std::optional<at::Tensor>& key_begin,
                                             const std::optional<at::Tensor>& key_end, bool causal,
                                             std::optional<double> scale, std::string_view rung);
std::tuple<at::Tensor&, at::Tensor&> attention_out(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                   const std::optional<at::Tensor>& key_begin,
                                                   const std::optional<at::Tensor>& key_end, bool causal,
                                                   std::optional<double> scale, std::string_view rung, at::Tensor& out,
                                                   at::Tensor& lse);
std::tuple<at::Tensor, at::Tensor> attention_autocast(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                      const std::optional<at::Tensor>& key_begin,
                                                      const std::optional<at::Tensor>& key_end, bool causal,
                                                      std::optional<double> scale, std::string_view rung);

// All of them, for Python's questions about their rungs.
std::vector<OpInfo> ops();

}  // namespace kf::step2
