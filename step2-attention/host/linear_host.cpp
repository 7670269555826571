// From a tensor to a rung for the matrix product of a layer: checks, allocation, dispatch.
#include <kf/autocast.h>
#include <step2/layer_host.h>
#include <torch/library.h>

#include "cpu/linear_cpu.h"
#include "host/registrations.h"

namespace kf::step2 {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

Op<kf::linear::Args> linear_op() {
  return {"linear", cpu::linear, emulated::linear::rungs(), gpu::linear::rungs(), kf::linear::automatic};
}

Op<kf::linear_backward::Args> linear_backward_op() {
  return {"linear_backward", cpu::linear_backward, emulated::linear_backward::rungs(), gpu::linear_backward::rungs(),
          kf::linear_backward::automatic};
}

Tensor& linear_out(const Tensor& x, const Tensor& weight, const Optional& bias, bool transposed, std::string_view rung,
                   Tensor& y) {
  const char* op = "linear";
  const int64_t width = check_layer(op, x, weight, bias, transposed);
  check_out(op, "y", y, with_width(x, width), "x", x);
  check_apart(op, {{"y", y}}, {{"x", x}, {"weight", weight}});
  if (bias) check_apart(op, {{"y", y}}, {{"bias", *bias}});
  check_rung(linear_op(), rung, x);
  if (y.numel() == 0) return y;
  const Layer layer(x, weight, bias, transposed);
  auto args = layer.args<kf::linear::Args>();
  args.y = y.data_ptr();
  run(linear_op(), rung, x, args);
  return y;
}

Tensor linear(const Tensor& x, const Tensor& weight, const Optional& bias, bool transposed, std::string_view rung) {
  Tensor y = empty_rows(x, check_layer("linear", x, weight, bias, transposed));
  return linear_out(x, weight, bias, transposed, rung, y);
}

std::tuple<Tensor&, Tensor&, Tensor&> linear_backward_out(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                          bool transposed, std::string_view rung, Tensor& grad_x,
                                                          Tensor& grad_weight, Tensor& grad_bias) {
  const char* op = "linear_backward";
  check_backward(op, grad, x, weight, transposed);
  check_gradients(op, grad, x, weight, grad_x, grad_weight, grad_bias);
  check_rung(linear_backward_op(), rung, grad);
  if (no_rows(grad, grad_weight, grad_bias)) return {grad_x, grad_weight, grad_bias};
  const Backward backward(grad, x, weight, transposed);
  run(linear_backward_op(), rung, grad, backward.args<kf::linear_backward::Args>(grad_x, grad_weight, grad_bias));
  return {grad_x, grad_weight, grad_bias};
}

std::tuple<Tensor, Tensor, Tensor> linear_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                   bool transposed, std::string_view rung) {
  check_backward("linear_backward", grad, x, weight, transposed);
  auto [grad_x, grad_weight, grad_bias] = empty_gradients(grad, x, weight);
  linear_backward_out(grad, x, weight, transposed, rung, grad_x, grad_weight, grad_bias);
  return {grad_x, grad_weight, grad_bias};
}

Tensor linear_autocast(const Tensor& x, const Tensor& weight, const Optional& bias, bool transposed,
                       std::string_view rung) {
  return call_in<linear>(std::nullopt, "step2_attention::linear", x, weight, bias, transposed, rung);
}

}  // namespace

void register_linear(torch::Library& m) {
  m.impl("linear", linear);
  m.impl("linear.out", linear_out);
  m.impl("linear_backward", linear_backward);
  m.impl("linear_backward.out", linear_backward_out);
}

void register_linear_autocast(torch::Library& m) { m.impl("linear", linear_autocast); }

std::vector<OpInfo> linear_ops() { return {describe(linear_op()), describe(linear_backward_op())}; }

}  // namespace kf::step2
