// sample on torch tensors; pybind.cpp registers it.
#pragma once

#include <ATen/core/Tensor.h>
#include <kf/host.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace kf::step4 {

std::tuple<at::Tensor, at::Tensor> sample(const at::Tensor& logits, const std::optional<at::Tensor>& rng_state,
                                          const std::optional<at::Tensor>& seen, double temperature, int64_t top_k,
                                          double top_p, double min_p, double repetition_penalty, std::string_view rung);
std::tuple<at::Tensor&, at::Tensor&> sample_out(const at::Tensor& logits, const std::optional<at::Tensor>& rng_state,
                                                const std::optional<at::Tensor>& seen, double temperature,
                                                int64_t top_k, double top_p, double min_p, double repetition_penalty,
                                                std::string_view rung, at::Tensor& token, at::Tensor& log_prob);

OpInfo sample_info();

}  // namespace kf::step4
