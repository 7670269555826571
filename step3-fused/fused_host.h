// This stage's ops on torch tensors; pybind.cpp registers them.
#pragma once

#include <ATen/core/Tensor.h>
#include <kf/host.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

namespace kf::step3 {

using at::Tensor;

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, std::string_view rung);
Tensor& layer_norm_out(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, std::string_view rung,
                       Tensor& out);

std::tuple<Tensor, Tensor> residual_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                               const Tensor& bias, double eps, std::string_view rung);
std::tuple<Tensor&, Tensor&> residual_layer_norm_out(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                                     const Tensor& bias, double eps, std::string_view rung, Tensor& y,
                                                     Tensor& sum);

Tensor attention_residual_layer_norm(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual,
                                     const Tensor& weight, const Tensor& bias, bool causal, std::optional<double> scale,
                                     double eps, std::string_view rung);
Tensor& attention_residual_layer_norm_out(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual,
                                          const Tensor& weight, const Tensor& bias, bool causal,
                                          std::optional<double> scale, double eps, std::string_view rung, Tensor& out);

std::tuple<Tensor, Tensor> attention_block(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual,
                                           const Tensor& proj_weight, const Tensor& proj_bias, const Tensor& weight,
                                           const Tensor& bias, bool causal, std::optional<double> scale, double eps,
                                           std::string_view rung);
std::tuple<Tensor&, Tensor&> attention_block_out(const Tensor& q, const Tensor& k, const Tensor& v,
                                                 const Tensor& residual, const Tensor& proj_weight,
                                                 const Tensor& proj_bias, const Tensor& weight, const Tensor& bias,
                                                 bool causal, std::optional<double> scale, double eps,
                                                 std::string_view rung, Tensor& y, Tensor& sum);

// Under torch.autocast: LayerNorm in float32, as PyTorch's; attention, and what is fused to it, in autocast's dtype.
Tensor layer_norm_autocast(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                           std::string_view rung);
std::tuple<Tensor, Tensor> residual_layer_norm_autocast(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                                        const Tensor& bias, double eps, std::string_view rung);
Tensor attention_residual_layer_norm_autocast(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual,
                                              const Tensor& weight, const Tensor& bias, bool causal,
                                              std::optional<double> scale, double eps, std::string_view rung);
std::tuple<Tensor, Tensor> attention_block_autocast(const Tensor& q, const Tensor& k, const Tensor& v,
                                                    const Tensor& residual, const Tensor& proj_weight,
                                                    const Tensor& proj_bias, const Tensor& weight, const Tensor& bias,
                                                    bool causal, std::optional<double> scale, double eps,
                                                    std::string_view rung);

// All of them, for Python's questions about their rungs.
std::vector<OpInfo> ops();

// How many kernels the emulation has launched for this extension: an op of three launches counts three.
int64_t emulated_kernels();

}  // namespace kf::step3
