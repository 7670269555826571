// From a tensor to a rung for the ops that fuse something to a matrix product: checks, allocation, dispatch.
#include <step2/layer_host.h>

#include "cpu/linear_cpu.h"
#include "host/fused_host.h"
#include "host/row_checks.h"

namespace kf::step3 {
namespace {

// ---- the ops ----

Op<kf::linear_gelu::Args> linear_gelu_op() {
  return {"linear_gelu", cpu::linear_gelu, emulated::linear_gelu::rungs(), gpu::linear_gelu::rungs(),
          kf::linear_gelu::automatic};
}

Op<kf::linear_gelu_backward::Args> linear_gelu_backward_op() {
  return {"linear_gelu_backward",
          cpu::linear_gelu_backward,
          emulated::linear_gelu_backward::rungs(),
          gpu::linear_gelu_backward::rungs(),
          kf::linear_gelu_backward::automatic,
          "grad · gelu'(preactivation)"};
}

Op<kf::gelu_linear::Args> gelu_linear_op() {
  return {"gelu_linear", cpu::gelu_linear, emulated::gelu_linear::rungs(), gpu::gelu_linear::rungs(),
          kf::gelu_linear::automatic};
}

Op<kf::gelu_linear_backward::Args> gelu_linear_backward_op() {
  return {"gelu_linear_backward",
          cpu::gelu_linear_backward,
          emulated::gelu_linear_backward::rungs(),
          gpu::gelu_linear_backward::rungs(),
          kf::gelu_linear_backward::automatic,
          "gelu(x)"};
}

Op<kf::layer_norm_linear::Args> layer_norm_linear_op() {
  return {"layer_norm_linear",
          cpu::layer_norm_linear,
          emulated::layer_norm_linear::rungs(),
          gpu::layer_norm_linear::rungs(),
          kf::layer_norm_linear::automatic,
          "the normalised rows"};
}

Op<kf::linear_bias_dropout_residual::Args> linear_bias_dropout_residual_op() {
  return {"linear_bias_dropout_residual", cpu::linear_bias_dropout_residual,
          emulated::linear_bias_dropout_residual::rungs(), gpu::linear_bias_dropout_residual::rungs(),
          kf::linear_bias_dropout_residual::automatic};
}

Op<kf::linear_bias_dropout_residual_backward::Args> linear_bias_dropout_residual_backward_op() {
  return {"linear_bias_dropout_residual_backward",
          cpu::linear_bias_dropout_residual_backward,
          emulated::linear_bias_dropout_residual_backward::rungs(),
          gpu::linear_bias_dropout_residual_backward::rungs(),
          kf::linear_bias_dropout_residual_backward::automatic,
          "the masked gradient"};
}

Op<kf::mlp::Args> mlp_op() {
  return {"mlp", cpu::mlp, emulated::mlp::rungs(), gpu::mlp::rungs(), kf::mlp::automatic, "the activation"};
}

// ---- checks ----

bool is_tanh(const char* op, std::string_view approximate) {
  TORCH_CHECK_VALUE(approximate == "tanh" || approximate == "none", op,
                    ": `approximate` must be 'tanh' or 'none', got '", approximate, "'");
  return approximate == "tanh";
}

// `width` columns, empty where it is not kept.
void make_or_check_preactivation(const char* op, Tensor& preactivation, const Tensor& x, int64_t width, bool keep) {
  const std::vector<int64_t> shape = keep ? with_width(x, width) : std::vector<int64_t>{0};
  make_or_check_out(op, "preactivation", preactivation, shape, "x", x);
}

void make_or_check_gradients(const char* op, const Tensor& grad, const Tensor& x, const Tensor& weight, Tensor& grad_x,
                             Tensor& grad_weight, Tensor& grad_bias, std::initializer_list<Named> more_inputs = {}) {
  if (!grad_x.defined()) std::tie(grad_x, grad_weight, grad_bias) = empty_gradients(grad, x, weight);
  check_gradients(op, grad, x, weight, grad_x, grad_weight, grad_bias, more_inputs);
}

}  // namespace

// ---- linear_gelu ----

void linear_gelu(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, bool transposed,
                 std::string_view approximate, bool keep, std::string_view rung, Tensor& y, Tensor& preactivation) {
  const char* op = "linear_gelu";
  const int64_t width = check_layer(op, x, weight, bias, transposed);
  const bool tanh = is_tanh(op, approximate);
  make_or_check_out(op, "y", y, with_width(x, width), "x", x);
  make_or_check_preactivation(op, preactivation, x, width, keep);
  const std::initializer_list<Named> outs = {{"y", y}, {"preactivation", preactivation}};
  check_apart(op, outs, {{"x", x}, {"weight", weight}});
  check_apart_if_given(op, outs, {{"bias", bias}});
  check_rung(linear_gelu_op(), rung, x);
  if (y.numel() == 0) return;
  const Layer layer(x, weight, bias, transposed);
  auto args = layer.args<kf::linear_gelu::Args>();
  args.y = y.data_ptr();
  args.preactivation = data_if(keep, preactivation);
  args.tanh = tanh;
  run(linear_gelu_op(), rung, x, args);
}

void linear_gelu_backward(const Tensor& grad, const Tensor& preactivation, const Tensor& x, const Tensor& weight,
                          bool transposed, std::string_view approximate, std::string_view rung, Tensor& grad_x,
                          Tensor& grad_weight, Tensor& grad_bias) {
  const char* op = "linear_gelu_backward";
  check_rows(op, "grad", grad);
  check_like(op, "preactivation", preactivation, "grad", grad, grad.sizes());
  check_backward(op, grad, x, weight, transposed);
  const bool tanh = is_tanh(op, approximate);
  make_or_check_gradients(op, grad, x, weight, grad_x, grad_weight, grad_bias, {{"preactivation", preactivation}});
  check_rung(linear_gelu_backward_op(), rung, grad);
  if (no_rows(grad, grad_weight, grad_bias)) return;
  const Backward backward(grad, x, weight, transposed);
  const Tensor h = in_one_piece(preactivation);
  auto args = backward.args<kf::linear_gelu_backward::Args>(grad_x, grad_weight, grad_bias);
  args.preactivation = h.data_ptr();
  args.tanh = tanh;
  run(linear_gelu_backward_op(), rung, grad, args);
}

// ---- gelu_linear ----

void gelu_linear(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, bool transposed,
                 std::string_view approximate, std::string_view rung, Tensor& y) {
  const char* op = "gelu_linear";
  const int64_t width = check_layer(op, x, weight, bias, transposed);
  const bool tanh = is_tanh(op, approximate);
  make_or_check_out(op, "y", y, with_width(x, width), "x", x);
  check_apart(op, {{"y", y}}, {{"x", x}, {"weight", weight}});
  check_apart_if_given(op, {{"y", y}}, {{"bias", bias}});
  check_rung(gelu_linear_op(), rung, x);
  if (y.numel() == 0) return;
  const Layer layer(x, weight, bias, transposed);
  auto args = layer.args<kf::gelu_linear::Args>();
  args.y = y.data_ptr();
  args.tanh = tanh;
  run(gelu_linear_op(), rung, x, args);
}

void gelu_linear_backward(const Tensor& grad, const Tensor& x, const Tensor& weight, bool transposed,
                          std::string_view approximate, std::string_view rung, Tensor& grad_x, Tensor& grad_weight,
                          Tensor& grad_bias) {
  const char* op = "gelu_linear_backward";
  check_backward(op, grad, x, weight, transposed);
  const bool tanh = is_tanh(op, approximate);
  make_or_check_gradients(op, grad, x, weight, grad_x, grad_weight, grad_bias);
  check_rung(gelu_linear_backward_op(), rung, grad);
  if (no_rows(grad, grad_weight, grad_bias)) return;
  const Backward backward(grad, x, weight, transposed);
  auto args = backward.args<kf::gelu_linear_backward::Args>(grad_x, grad_weight, grad_bias);
  args.tanh = tanh;
  run(gelu_linear_backward_op(), rung, grad, args);
}

// ---- layer_norm_linear ----

void layer_norm_linear(const Tensor& x, const Tensor& norm_weight, const Tensor& norm_bias, const Tensor& weight,
                       const MaybeTensor& bias, bool transposed, double eps, std::string_view rung, Tensor& y,
                       Tensor& mean, Tensor& rstd) {
  const char* op = "layer_norm_linear";
  const int64_t width = check_layer(op, x, weight, bias, transposed);
  check_like(op, "norm_weight", norm_weight, "x", x, {x.size(-1)});
  check_like(op, "norm_bias", norm_bias, "x", x, {x.size(-1)});
  check_eps(op, eps);
  make_or_check_out(op, "y", y, with_width(x, width), "x", x);
  make_or_check_statistics(op, mean, rstd, "x", x);
  const std::initializer_list<Named> outs = {{"y", y}, {"mean", mean}, {"rstd", rstd}};
  check_apart(op, outs, {{"x", x}, {"norm_weight", norm_weight}, {"norm_bias", norm_bias}, {"weight", weight}});
  check_apart_if_given(op, outs, {{"bias", bias}});
  check_rung(layer_norm_linear_op(), rung, x);
  if (y.numel() == 0) return;
  const Layer layer(x, weight, bias, transposed);
  const Tensor nw = in_one_piece(norm_weight), nb = in_one_piece(norm_bias);
  auto args = layer.args<kf::layer_norm_linear::Args>();
  args.norm_weight = nw.data_ptr();
  args.norm_bias = nb.data_ptr();
  args.y = y.data_ptr();
  args.mean = mean.data_ptr();
  args.rstd = rstd.data_ptr();
  args.eps = eps;
  run(layer_norm_linear_op(), rung, x, args);
}

// ---- linear_bias_dropout_residual ----

void linear_bias_dropout_residual(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                                  const Tensor& residual, double dropout_p, const Tensor& rng_state, bool transposed,
                                  std::string_view rung, Tensor& y) {
  const char* op = "linear_bias_dropout_residual";
  const int64_t width = check_layer(op, x, weight, bias, transposed);
  check_like(op, "residual", residual, "x", x, with_width(x, width));
  const DropoutArgs dropout(op, "dropout_p", dropout_p, "rng_state", rng_state, x);
  make_or_check_out(op, "y", y, with_width(x, width), "x", x);
  check_apart(op, {{"y", y}}, {{"x", x}, {"weight", weight}, {"residual", residual}, {"rng_state", rng_state}});
  check_apart_if_given(op, {{"y", y}}, {{"bias", bias}});
  check_rung(linear_bias_dropout_residual_op(), rung, x);
  if (y.numel() == 0) return;
  const Layer layer(x, weight, bias, transposed);
  const Tensor r = in_one_piece(residual);
  auto args = layer.args<kf::linear_bias_dropout_residual::Args>();
  args.residual = r.data_ptr();
  args.y = y.data_ptr();
  dropout.set(args);
  run(linear_bias_dropout_residual_op(), rung, x, args);
}

void linear_bias_dropout_residual_backward(const Tensor& grad, const Tensor& x, const Tensor& weight, double dropout_p,
                                           const Tensor& rng_state, bool transposed, std::string_view rung,
                                           Tensor& grad_x, Tensor& grad_weight, Tensor& grad_bias) {
  const char* op = "linear_bias_dropout_residual_backward";
  check_backward(op, grad, x, weight, transposed);
  const DropoutArgs dropout(op, "dropout_p", dropout_p, "rng_state", rng_state, grad);
  make_or_check_gradients(op, grad, x, weight, grad_x, grad_weight, grad_bias, {{"rng_state", rng_state}});
  check_rung(linear_bias_dropout_residual_backward_op(), rung, grad);
  if (no_rows(grad, grad_weight, grad_bias)) return;
  const Backward backward(grad, x, weight, transposed);
  auto args = backward.args<kf::linear_bias_dropout_residual_backward::Args>(grad_x, grad_weight, grad_bias);
  dropout.set(args);
  run(linear_bias_dropout_residual_backward_op(), rung, grad, args);
}

// ---- mlp ----

void mlp(const Tensor& x, const Tensor& weight_1, const Tensor& bias_1, const Tensor& weight_2, const Tensor& bias_2,
         const MaybeTensor& residual, bool transposed, std::string_view approximate, bool keep, std::string_view rung,
         Tensor& y, Tensor& preactivation) {
  const char* op = "mlp";
  const int64_t width = check_rows(op, "x", x);
  const int64_t inner = check_weight(op, "weight_1", weight_1, transposed, width, "x", x);
  check_like(op, "bias_1", bias_1, "x", x, {inner});
  check_like(op, "weight_2", weight_2, "x", x,
             transposed ? at::IntArrayRef{width, inner} : at::IntArrayRef{inner, width});
  check_like(op, "bias_2", bias_2, "x", x, {width});
  if (residual) check_like(op, "residual", *residual, "x", x, x.sizes());
  const bool tanh = is_tanh(op, approximate);
  make_or_check_out(op, "y", y, x.sizes(), "x", x);
  make_or_check_preactivation(op, preactivation, x, inner, keep);
  const std::initializer_list<Named> outs = {{"y", y}, {"preactivation", preactivation}};
  check_apart(op, outs,
              {{"x", x}, {"weight_1", weight_1}, {"bias_1", bias_1}, {"weight_2", weight_2}, {"bias_2", bias_2}});
  check_apart_if_given(op, outs, {{"residual", residual}});
  check_rung(mlp_op(), rung, x);
  if (y.numel() == 0) return;
  const Tensor in = in_one_piece(x), w1 = in_one_piece(weight_1), b1 = in_one_piece(bias_1);
  const Tensor w2 = in_one_piece(weight_2), b2 = in_one_piece(bias_2);
  const Tensor r = residual ? in_one_piece(*residual) : Tensor();
  kf::mlp::Args args{};
  args.x = in.data_ptr();
  args.weight_1 = w1.data_ptr();
  args.bias_1 = b1.data_ptr();
  args.weight_2 = w2.data_ptr();
  args.bias_2 = b2.data_ptr();
  args.residual = data_or_null(r);
  args.y = y.data_ptr();
  args.preactivation = data_if(keep, preactivation);
  args.width = width;
  args.rows = x.numel() / width;
  args.inner = inner;
  args.weight_transposed = transposed;
  args.tanh = tanh;
  args.tf32 = tf32_allowed();
  args.dtype = dtype_of(x);
  run(mlp_op(), rung, x, args);
}

// ---- what there is ----

std::vector<OpInfo> linear_ops() {
  return {describe(linear_gelu_op()),
          describe(linear_gelu_backward_op()),
          describe(gelu_linear_op()),
          describe(gelu_linear_backward_op()),
          describe(layer_norm_linear_op()),
          describe(linear_bias_dropout_residual_op()),
          describe(linear_bias_dropout_residual_backward_op()),
          describe(mlp_op())};
}

}  // namespace kf::step3
