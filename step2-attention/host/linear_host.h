// The matrix product of a layer on torch tensors; pybind.cpp registers it.
#pragma once

#include <ATen/core/Tensor.h>
#include <kf/host.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

namespace kf::step2 {

// x [..., depth], weight [depth, width] or, transposed, [width, depth], bias [width]; y [..., width].
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, bool transposed,
                  std::string_view rung);
at::Tensor& linear_out(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       bool transposed, std::string_view rung, at::Tensor& y);
// The gradients of x, weight and bias.
std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_backward(const at::Tensor& grad, const at::Tensor& x,
                                                               const at::Tensor& weight, bool transposed,
                                                               std::string_view rung);
std::tuple<at::Tensor&, at::Tensor&, at::Tensor&> linear_backward_out(const at::Tensor& grad, const at::Tensor& x,
                                                                      const at::Tensor& weight, bool transposed,
                                                                      std::string_view rung, at::Tensor& grad_x,
                                                                      at::Tensor& grad_weight, at::Tensor& grad_bias);

// Under torch.autocast: in its dtype, as PyTorch's products.
at::Tensor linear_autocast(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                           bool transposed, std::string_view rung);

// Both, for Python's questions about their rungs.
std::vector<OpInfo> linear_ops();

}  // namespace kf::step2
