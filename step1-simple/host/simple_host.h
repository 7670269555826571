// This step's ops on torch tensors; pybind.cpp registers them. Python's docstrings say what each does.
#pragma once

#include <ATen/core/Tensor.h>
#include <kf/host.h>

#include <string_view>
#include <tuple>
#include <vector>

namespace kf::step1 {

using at::Tensor;
using std::string_view;

Tensor scale(const Tensor& x, double factor, string_view rung);
Tensor& scale_out(const Tensor& x, double factor, string_view rung, Tensor& out);

Tensor gelu(const Tensor& x, string_view approximate, string_view rung);
Tensor& gelu_out(const Tensor& x, string_view approximate, string_view rung, Tensor& out);

Tensor gelu_scale(const Tensor& x, double factor, string_view approximate, string_view rung);
Tensor& gelu_scale_out(const Tensor& x, double factor, string_view approximate, string_view rung, Tensor& out);

// The gradient of gelu_scale, and with factor 1 of gelu.
Tensor gelu_backward(const Tensor& grad, const Tensor& x, double factor, string_view approximate, string_view rung);
Tensor& gelu_backward_out(const Tensor& grad, const Tensor& x, double factor, string_view approximate, string_view rung,
                          Tensor& out);

Tensor bias_gelu(const Tensor& x, const Tensor& bias, string_view approximate, string_view rung);
Tensor& bias_gelu_out(const Tensor& x, const Tensor& bias, string_view approximate, string_view rung, Tensor& out);
// Under autocast: x and bias in autocast's dtype, then the op.
Tensor bias_gelu_autocast(const Tensor& x, const Tensor& bias, string_view approximate, string_view rung);

// The gradients of x and bias.
std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& grad, const Tensor& x, const Tensor& bias,
                                              string_view approximate, string_view rung);
std::tuple<Tensor&, Tensor&> bias_gelu_backward_out(const Tensor& grad, const Tensor& x, const Tensor& bias,
                                                    string_view approximate, string_view rung, Tensor& grad_x,
                                                    Tensor& grad_bias);

Tensor bias_dropout_residual(const Tensor& x, const Tensor& bias, const Tensor& residual, double dropout_p,
                             const Tensor& rng_state, string_view rung);
Tensor& bias_dropout_residual_out(const Tensor& x, const Tensor& bias, const Tensor& residual, double dropout_p,
                                  const Tensor& rng_state, string_view rung, Tensor& out);
// Under autocast: x, bias and residual in the widest of their dtypes, as PyTorch adds them.
Tensor bias_dropout_residual_autocast(const Tensor& x, const Tensor& bias, const Tensor& residual, double dropout_p,
                                      const Tensor& rng_state, string_view rung);

// The gradients of x and bias; that of the residual is `grad`.
std::tuple<Tensor, Tensor> bias_dropout_residual_backward(const Tensor& grad, double dropout_p, const Tensor& rng_state,
                                                          string_view rung);
std::tuple<Tensor&, Tensor&> bias_dropout_residual_backward_out(const Tensor& grad, double dropout_p,
                                                                const Tensor& rng_state, string_view rung,
                                                                Tensor& grad_x, Tensor& grad_bias);

Tensor column_sum(const Tensor& x, string_view rung);
Tensor& column_sum_out(const Tensor& x, string_view rung, Tensor& out);

// All of them, for Python's questions about their rungs.
std::vector<OpInfo> ops();

}  // namespace kf::step1
