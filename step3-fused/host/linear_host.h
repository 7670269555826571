// The ops that fuse something to a matrix product, on torch tensors; pybind.cpp registers them.
#pragma once

#include <ATen/core/Tensor.h>
#include <kf/host.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

namespace kf::step3 {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using TwoTensors = std::tuple<Tensor, Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;
using TwoOuts = std::tuple<Tensor&, Tensor&>;
using ThreeOuts = std::tuple<Tensor&, Tensor&, Tensor&>;

// Of all: x [..., depth], weight [depth, width] or, transposed, [width, depth], bias [width]; y [..., width].

// y and preactivation; the latter is empty unless `keep`.
TwoTensors linear_gelu(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, bool transposed,
                       std::string_view approximate, bool keep, std::string_view rung);
TwoOuts linear_gelu_out(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, bool transposed,
                        std::string_view approximate, bool keep, std::string_view rung, Tensor& y,
                        Tensor& preactivation);
ThreeTensors linear_gelu_backward(const Tensor& grad, const Tensor& preactivation, const Tensor& x,
                                  const Tensor& weight, bool transposed, std::string_view approximate,
                                  std::string_view rung);
ThreeOuts linear_gelu_backward_out(const Tensor& grad, const Tensor& preactivation, const Tensor& x,
                                   const Tensor& weight, bool transposed, std::string_view approximate,
                                   std::string_view rung, Tensor& grad_x, Tensor& grad_weight, Tensor& grad_bias);

Tensor gelu_linear(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, bool transposed,
                   std::string_view approximate, std::string_view rung);
Tensor& gelu_linear_out(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, bool transposed,
                        std::string_view approximate, std::string_view rung, Tensor& y);
ThreeTensors gelu_linear_backward(const Tensor& grad, const Tensor& x, const Tensor& weight, bool transposed,
                                  std::string_view approximate, std::string_view rung);
ThreeOuts gelu_linear_backward_out(const Tensor& grad, const Tensor& x, const Tensor& weight, bool transposed,
                                   std::string_view approximate, std::string_view rung, Tensor& grad_x,
                                   Tensor& grad_weight, Tensor& grad_bias);

// y, mean, rstd.
ThreeTensors layer_norm_linear(const Tensor& x, const Tensor& norm_weight, const Tensor& norm_bias,
                               const Tensor& weight, const MaybeTensor& bias, bool transposed, double eps,
                               std::string_view rung);
ThreeOuts layer_norm_linear_out(const Tensor& x, const Tensor& norm_weight, const Tensor& norm_bias,
                                const Tensor& weight, const MaybeTensor& bias, bool transposed, double eps,
                                std::string_view rung, Tensor& y, Tensor& mean, Tensor& rstd);

Tensor linear_bias_dropout_residual(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                                    const Tensor& residual, double dropout_p, const Tensor& rng_state, bool transposed,
                                    std::string_view rung);
Tensor& linear_bias_dropout_residual_out(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                                         const Tensor& residual, double dropout_p, const Tensor& rng_state,
                                         bool transposed, std::string_view rung, Tensor& y);
ThreeTensors linear_bias_dropout_residual_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                   double dropout_p, const Tensor& rng_state, bool transposed,
                                                   std::string_view rung);
ThreeOuts linear_bias_dropout_residual_backward_out(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                    double dropout_p, const Tensor& rng_state, bool transposed,
                                                    std::string_view rung, Tensor& grad_x, Tensor& grad_weight,
                                                    Tensor& grad_bias);

// y and preactivation, as linear_gelu's.
TwoTensors mlp(const Tensor& x, const Tensor& weight_1, const Tensor& bias_1, const Tensor& weight_2,
               const Tensor& bias_2, const MaybeTensor& residual, bool transposed, std::string_view approximate,
               bool keep, std::string_view rung);
TwoOuts mlp_out(const Tensor& x, const Tensor& weight_1, const Tensor& bias_1, const Tensor& weight_2,
                const Tensor& bias_2, const MaybeTensor& residual, bool transposed, std::string_view approximate,
                bool keep, std::string_view rung, Tensor& y, Tensor& preactivation);

// Under torch.autocast: in its dtype, as PyTorch's products.
TwoTensors linear_gelu_autocast(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, bool transposed,
                                std::string_view approximate, bool keep, std::string_view rung);
Tensor gelu_linear_autocast(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, bool transposed,
                            std::string_view approximate, std::string_view rung);
ThreeTensors layer_norm_linear_autocast(const Tensor& x, const Tensor& norm_weight, const Tensor& norm_bias,
                                        const Tensor& weight, const MaybeTensor& bias, bool transposed, double eps,
                                        std::string_view rung);
Tensor linear_bias_dropout_residual_autocast(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                                             const Tensor& residual, double dropout_p, const Tensor& rng_state,
                                             bool transposed, std::string_view rung);
TwoTensors mlp_autocast(const Tensor& x, const Tensor& weight_1, const Tensor& bias_1, const Tensor& weight_2,
                        const Tensor& bias_2, const MaybeTensor& residual, bool transposed,
                        std::string_view approximate, bool keep, std::string_view rung);

// All of them, for Python's questions about their rungs.
std::vector<OpInfo> linear_ops();

}  // namespace kf::step3
