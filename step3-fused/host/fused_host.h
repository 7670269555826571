// This step's ops on torch tensors; pybind.cpp registers them. Each writes to its last arguments, and makes those that
// are not defined.
#pragma once

#include <ATen/core/Tensor.h>
#include <kf/host.h>

#include <optional>
#include <string_view>
#include <vector>

namespace kf::step3 {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

// mean and rstd, as everything that is kept for the way back, are empty unless `keep`.
void layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, bool keep, std::string_view rung,
                Tensor& y, Tensor& mean, Tensor& rstd);

// The gradients of x, weight and bias. `grad_sum`: what else x owes, where it is a sum that goes on.
void layer_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& weight, const Tensor& mean,
                         const Tensor& rstd, const MaybeTensor& grad_sum, std::string_view rung, Tensor& grad_x,
                         Tensor& grad_weight, Tensor& grad_bias);

// `rng_state` may be none where `dropout_p` is 0; so in the next two.
void residual_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias,
                         const MaybeTensor& x_bias, double dropout_p, const MaybeTensor& rng_state, double eps,
                         bool keep, std::string_view rung, Tensor& y, Tensor& sum, Tensor& mean, Tensor& rstd);

// For the way back: attention's output, the log-sum-exp of each query, mean and rstd of what was normalised.
void attention_residual_layer_norm(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual,
                                   const Tensor& weight, const Tensor& bias, const MaybeTensor& key_begin,
                                   const MaybeTensor& key_end, const MaybeTensor& attention_rng_state, bool causal,
                                   std::optional<double> scale, double eps, double attention_dropout_p, bool keep,
                                   std::string_view rung, Tensor& out, Tensor& attended, Tensor& lse, Tensor& mean,
                                   Tensor& rstd);
void attention_block(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual,
                     const Tensor& proj_weight, const Tensor& proj_bias, const Tensor& weight, const Tensor& bias,
                     const MaybeTensor& key_begin, const MaybeTensor& key_end, const MaybeTensor& rng_state,
                     const MaybeTensor& attention_rng_state, const MaybeTensor& cu_seqlens, bool causal,
                     std::optional<double> scale, double eps, double dropout_p, double attention_dropout_p, bool keep,
                     std::string_view rung, Tensor& y, Tensor& sum, Tensor& attended, Tensor& lse, Tensor& mean,
                     Tensor& rstd);

// Of all that follow: x [..., depth], weight [depth, width] or, transposed, [width, depth], bias [width]; y
// [..., width].
void linear_gelu(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, bool transposed,
                 std::string_view approximate, bool keep, std::string_view rung, Tensor& y, Tensor& preactivation);
void linear_gelu_backward(const Tensor& grad, const Tensor& preactivation, const Tensor& x, const Tensor& weight,
                          bool transposed, std::string_view approximate, std::string_view rung, Tensor& grad_x,
                          Tensor& grad_weight, Tensor& grad_bias);
void gelu_linear(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, bool transposed,
                 std::string_view approximate, std::string_view rung, Tensor& y);
void gelu_linear_backward(const Tensor& grad, const Tensor& x, const Tensor& weight, bool transposed,
                          std::string_view approximate, std::string_view rung, Tensor& grad_x, Tensor& grad_weight,
                          Tensor& grad_bias);
void layer_norm_linear(const Tensor& x, const Tensor& norm_weight, const Tensor& norm_bias, const Tensor& weight,
                       const MaybeTensor& bias, bool transposed, double eps, std::string_view rung, Tensor& y,
                       Tensor& mean, Tensor& rstd);
void linear_bias_dropout_residual(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                                  const Tensor& residual, double dropout_p, const Tensor& rng_state, bool transposed,
                                  std::string_view rung, Tensor& y);
void linear_bias_dropout_residual_backward(const Tensor& grad, const Tensor& x, const Tensor& weight, double dropout_p,
                                           const Tensor& rng_state, bool transposed, std::string_view rung,
                                           Tensor& grad_x, Tensor& grad_weight, Tensor& grad_bias);
void mlp(const Tensor& x, const Tensor& weight_1, const Tensor& bias_1, const Tensor& weight_2, const Tensor& bias_2,
         const MaybeTensor& residual, bool transposed, std::string_view approximate, bool keep, std::string_view rung,
         Tensor& y, Tensor& preactivation);

// All of them, for Python's questions about their rungs; those of linear_host.cpp.
std::vector<OpInfo> ops();
std::vector<OpInfo> linear_ops();

}  // namespace kf::step3
