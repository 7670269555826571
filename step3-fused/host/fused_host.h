// This step's ops on torch tensors; pybind.cpp registers them.
#pragma once

#include <ATen/core/Tensor.h>
#include <kf/host.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

namespace kf::step3 {

using at::Tensor;

// y, mean, rstd; the last two are empty unless `keep`.
std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                                              bool keep, std::string_view rung);
std::tuple<Tensor&, Tensor&, Tensor&> layer_norm_out(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                                     double eps, bool keep, std::string_view rung, Tensor& y,
                                                     Tensor& mean, Tensor& rstd);

// The gradients of x, weight and bias. `grad_sum`: what else x owes, where it is a sum that goes on.
std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                       const Tensor& mean, const Tensor& rstd,
                                                       const std::optional<Tensor>& grad_sum, std::string_view rung);
std::tuple<Tensor&, Tensor&, Tensor&> layer_norm_backward_out(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                              const Tensor& mean, const Tensor& rstd,
                                                              const std::optional<Tensor>& grad_sum,
                                                              std::string_view rung, Tensor& grad_x,
                                                              Tensor& grad_weight, Tensor& grad_bias);

// y, sum, mean, rstd; the last two are empty unless `keep`.
std::tuple<Tensor, Tensor, Tensor, Tensor> residual_layer_norm(const Tensor& x, const Tensor& residual,
                                                               const Tensor& weight, const Tensor& bias,
                                                               const std::optional<Tensor>& x_bias, double dropout_p,
                                                               const std::optional<Tensor>& rng_state, double eps,
                                                               bool keep, std::string_view rung);
std::tuple<Tensor&, Tensor&, Tensor&, Tensor&> residual_layer_norm_out(
    const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias,
    const std::optional<Tensor>& x_bias, double dropout_p, const std::optional<Tensor>& rng_state, double eps,
    bool keep, std::string_view rung, Tensor& y, Tensor& sum, Tensor& mean, Tensor& rstd);

// The output, and what the way back wants: attention's output, the log-sum-exp of each query, mean and rstd of what was
// normalised; these are empty unless `keep`. `attention_rng_state` may be none where `attention_dropout_p` is 0.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_residual_layer_norm(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual, const Tensor& weight, const Tensor& bias,
    const std::optional<Tensor>& key_begin, const std::optional<Tensor>& key_end,
    const std::optional<Tensor>& attention_rng_state, bool causal, std::optional<double> scale, double eps,
    double attention_dropout_p, bool keep, std::string_view rung);
std::tuple<Tensor&, Tensor&, Tensor&, Tensor&, Tensor&> attention_residual_layer_norm_out(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual, const Tensor& weight, const Tensor& bias,
    const std::optional<Tensor>& key_begin, const std::optional<Tensor>& key_end,
    const std::optional<Tensor>& attention_rng_state, bool causal, std::optional<double> scale, double eps,
    double attention_dropout_p, bool keep, std::string_view rung, Tensor& out, Tensor& attended, Tensor& lse,
    Tensor& mean, Tensor& rstd);

// y, sum, and what the way back wants, as above. `rng_state` may be none where `dropout_p` is 0.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_block(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual, const Tensor& proj_weight,
    const Tensor& proj_bias, const Tensor& weight, const Tensor& bias, const std::optional<Tensor>& key_begin,
    const std::optional<Tensor>& key_end, const std::optional<Tensor>& rng_state,
    const std::optional<Tensor>& attention_rng_state, bool causal, std::optional<double> scale, double eps,
    double dropout_p, double attention_dropout_p, bool keep, std::string_view rung);
std::tuple<Tensor&, Tensor&, Tensor&, Tensor&, Tensor&, Tensor&> attention_block_out(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual, const Tensor& proj_weight,
    const Tensor& proj_bias, const Tensor& weight, const Tensor& bias, const std::optional<Tensor>& key_begin,
    const std::optional<Tensor>& key_end, const std::optional<Tensor>& rng_state,
    const std::optional<Tensor>& attention_rng_state, bool causal, std::optional<double> scale, double eps,
    double dropout_p, double attention_dropout_p, bool keep, std::string_view rung, Tensor& y, Tensor& sum,
    Tensor& attended, Tensor& lse, Tensor& mean, Tensor& rstd);

// Under torch.autocast: LayerNorm in float32, as PyTorch's; attention, and what is fused to it, in autocast's dtype.
std::tuple<Tensor, Tensor, Tensor> layer_norm_autocast(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                                       double eps, bool keep, std::string_view rung);
std::tuple<Tensor, Tensor, Tensor, Tensor> residual_layer_norm_autocast(const Tensor& x, const Tensor& residual,
                                                                        const Tensor& weight, const Tensor& bias,
                                                                        const std::optional<Tensor>& x_bias,
                                                                        double dropout_p,
                                                                        const std::optional<Tensor>& rng_state,
                                                                        double eps, bool keep, std::string_view rung);
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_residual_layer_norm_autocast(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual, const Tensor& weight, const Tensor& bias,
    const std::optional<Tensor>& key_begin, const std::optional<Tensor>& key_end,
    const std::optional<Tensor>& attention_rng_state, bool causal, std::optional<double> scale, double eps,
    double attention_dropout_p, bool keep, std::string_view rung);
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_block_autocast(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual, const Tensor& proj_weight,
    const Tensor& proj_bias, const Tensor& weight, const Tensor& bias, const std::optional<Tensor>& key_begin,
    const std::optional<Tensor>& key_end, const std::optional<Tensor>& rng_state,
    const std::optional<Tensor>& attention_rng_state, bool causal, std::optional<double> scale, double eps,
    double dropout_p, double attention_dropout_p, bool keep, std::string_view rung);

// All of them, for Python's questions about their rungs.
std::vector<OpInfo> ops();

// How many kernels the emulation has launched for this extension: an op of three launches counts three.
int64_t emulated_kernels();

}  // namespace kf::step3
