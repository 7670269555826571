// From a tensor to a rung: checks, allocation, dispatch. The only place of this step where torch and kernels meet.
#include "host/simple_host.h"

#include <ATen/ops/empty.h>
#include <kf/autocast.h>
#include <kf/dropout.h>

#include <cstdint>

#include "cpu/simple_cpu.h"

namespace kf::step1 {
namespace {

// ---- the ops: plain C++, the two tables, and what `auto` takes on a GPU ----

const Op<kf::scale::Args> kScale = {"scale", cpu::scale, emulated::scale::rungs(), gpu::scale::rungs(),
                                    kf::scale::automatic};
const Op<kf::gelu::Args> kGelu = {"gelu", cpu::gelu, emulated::gelu::rungs(), gpu::gelu::rungs(), kf::gelu::automatic};
const Op<kf::gelu_scale::Args> kGeluScale = {"gelu_scale", cpu::gelu_scale, emulated::gelu_scale::rungs(),
                                             gpu::gelu_scale::rungs(), kf::gelu_scale::automatic};
const Op<kf::gelu_backward::Args> kGeluBackward = {"gelu_backward", cpu::gelu_backward,
                                                   emulated::gelu_backward::rungs(), gpu::gelu_backward::rungs(),
                                                   kf::gelu_backward::automatic};
const Op<kf::bias_gelu::Args> kBiasGelu = {"bias_gelu", cpu::bias_gelu, emulated::bias_gelu::rungs(),
                                           gpu::bias_gelu::rungs(), kf::bias_gelu::automatic};
const Op<kf::bias_gelu_backward::Args> kBiasGeluBackward = {
    "bias_gelu_backward", cpu::bias_gelu_backward, emulated::bias_gelu_backward::rungs(),
    gpu::bias_gelu_backward::rungs(), kf::bias_gelu_backward::automatic};
const Op<kf::bias_dropout_residual::Args> kBiasDropoutResidual = {
    "bias_dropout_residual", cpu::bias_dropout_residual, emulated::bias_dropout_residual::rungs(),
    gpu::bias_dropout_residual::rungs(), kf::bias_dropout_residual::automatic};
const Op<kf::bias_dropout_residual_backward::Args> kBiasDropoutResidualBackward = {
    "bias_dropout_residual_backward", cpu::bias_dropout_residual_backward,
    emulated::bias_dropout_residual_backward::rungs(), gpu::bias_dropout_residual_backward::rungs(),
    kf::bias_dropout_residual_backward::automatic};
const Op<kf::column_sum::Args> kColumnSum = {"column_sum", cpu::column_sum, emulated::column_sum::rungs(),
                                             gpu::column_sum::rungs(), kf::column_sum::automatic};

// ---- what several ops share ----

bool is_tanh(const char* op, string_view approximate) {
  TORCH_CHECK_VALUE(approximate == "tanh" || approximate == "none", op,
                    ": `approximate` must be 'tanh' or 'none', got '", approximate, "'");
  return approximate == "tanh";
}

// Checks and runs an op of x alone. `more` is what its Args hold between the number of elements and the dtype.
template <class Args, class... More>
Tensor& element_by_element(const Op<Args>& op, const Tensor& x, string_view rung, Tensor& out, More... more) {
  check_out(op.name, "out", out, x.sizes(), "x", x);
  check_apart(op.name, {{"out", out}}, {{"x", x}});
  check_rung(op, rung, x);
  if (x.numel() == 0) return out;
  const Tensor contiguous = x.contiguous();
  run(op, rung, x, Args{contiguous.data_ptr(), out.data_ptr(), x.numel(), more..., dtype_of(x)});
  return out;
}

int64_t rows_of(const Tensor& x) { return x.numel() / x.size(-1); }

Tensor one_row(const Tensor& x) {
  return x.dim() == 0 ? at::empty({0}, x.options()) : at::empty({x.size(-1)}, x.options());
}

}  // namespace

// ---- scale ----

Tensor& scale_out(const Tensor& x, double factor, string_view rung, Tensor& out) {
  check_floating("scale", "x", x);
  return element_by_element(kScale, x, rung, out, factor);
}

Tensor scale(const Tensor& x, double factor, string_view rung) {
  Tensor out = contiguous_like(x);
  return scale_out(x, factor, rung, out);
}

// ---- gelu, gelu_scale and their gradient ----

Tensor& gelu_out(const Tensor& x, string_view approximate, string_view rung, Tensor& out) {
  check_floating("gelu", "x", x);
  return element_by_element(kGelu, x, rung, out, is_tanh("gelu", approximate));
}

Tensor gelu(const Tensor& x, string_view approximate, string_view rung) {
  Tensor out = contiguous_like(x);
  return gelu_out(x, approximate, rung, out);
}

Tensor& gelu_scale_out(const Tensor& x, double factor, string_view approximate, string_view rung, Tensor& out) {
  check_floating("gelu_scale", "x", x);
  return element_by_element(kGeluScale, x, rung, out, factor, is_tanh("gelu_scale", approximate));
}

Tensor gelu_scale(const Tensor& x, double factor, string_view approximate, string_view rung) {
  Tensor out = contiguous_like(x);
  return gelu_scale_out(x, factor, approximate, rung, out);
}

Tensor& gelu_backward_out(const Tensor& grad, const Tensor& x, double factor, string_view approximate, string_view rung,
                          Tensor& out) {
  check_floating("gelu_backward", "grad", grad);
  check_like("gelu_backward", "x", x, "grad", grad, grad.sizes());
  const bool tanh = is_tanh("gelu_backward", approximate);
  check_out("gelu_backward", "out", out, x.sizes(), "grad", grad);
  check_apart("gelu_backward", {{"out", out}}, {{"grad", grad}, {"x", x}});
  check_rung(kGeluBackward, rung, x);
  if (x.numel() == 0) return out;
  const Tensor contiguous_grad = grad.contiguous(), contiguous = x.contiguous();
  run(kGeluBackward, rung, x,
      {contiguous_grad.data_ptr(), contiguous.data_ptr(), out.data_ptr(), x.numel(), factor, tanh, dtype_of(x)});
  return out;
}

Tensor gelu_backward(const Tensor& grad, const Tensor& x, double factor, string_view approximate, string_view rung) {
  Tensor out = contiguous_like(grad);
  return gelu_backward_out(grad, x, factor, approximate, rung, out);
}

// ---- bias_gelu ----

Tensor& bias_gelu_out(const Tensor& x, const Tensor& bias, string_view approximate, string_view rung, Tensor& out) {
  check_rows("bias_gelu", "x", x);
  check_like("bias_gelu", "bias", bias, "x", x, {x.size(-1)});
  const bool tanh = is_tanh("bias_gelu", approximate);
  check_out("bias_gelu", "out", out, x.sizes(), "x", x);
  check_apart("bias_gelu", {{"out", out}}, {{"x", x}, {"bias", bias}});
  check_rung(kBiasGelu, rung, x);
  if (x.numel() == 0) return out;
  const Tensor contiguous = x.contiguous(), contiguous_bias = bias.contiguous();
  run(kBiasGelu, rung, x,
      {contiguous.data_ptr(), contiguous_bias.data_ptr(), out.data_ptr(), rows_of(x), x.size(-1), tanh, dtype_of(x)});
  return out;
}

Tensor bias_gelu(const Tensor& x, const Tensor& bias, string_view approximate, string_view rung) {
  Tensor out = contiguous_like(x);
  return bias_gelu_out(x, bias, approximate, rung, out);
}

Tensor bias_gelu_autocast(const Tensor& x, const Tensor& bias, string_view approximate, string_view rung) {
  return call_in<bias_gelu>(std::nullopt, "step1_simple::bias_gelu", x, bias, approximate, rung);
}

std::tuple<Tensor&, Tensor&> bias_gelu_backward_out(const Tensor& grad, const Tensor& x, const Tensor& bias,
                                                    string_view approximate, string_view rung, Tensor& grad_x,
                                                    Tensor& grad_bias) {
  constexpr const char* op = "bias_gelu_backward";
  check_rows(op, "grad", grad);
  check_like(op, "x", x, "grad", grad, grad.sizes());
  check_like(op, "bias", bias, "grad", grad, {grad.size(-1)});
  const bool tanh = is_tanh(op, approximate);
  check_out(op, "grad_x", grad_x, x.sizes(), "grad", grad);
  check_out(op, "grad_bias", grad_bias, bias.sizes(), "grad", grad);
  check_apart(op, {{"grad_x", grad_x}, {"grad_bias", grad_bias}}, {{"grad", grad}, {"x", x}, {"bias", bias}});
  check_rung(kBiasGeluBackward, rung, x);
  if (x.numel() == 0) {
    grad_bias.zero_();
    return {grad_x, grad_bias};
  }
  const Tensor contiguous_grad = grad.contiguous(), contiguous = x.contiguous(), contiguous_bias = bias.contiguous();
  run(kBiasGeluBackward, rung, x,
      {contiguous_grad.data_ptr(), contiguous.data_ptr(), contiguous_bias.data_ptr(), grad_x.data_ptr(),
       grad_bias.data_ptr(), rows_of(x), x.size(-1), tanh, dtype_of(x)});
  return {grad_x, grad_bias};
}

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& grad, const Tensor& x, const Tensor& bias,
                                              string_view approximate, string_view rung) {
  Tensor grad_x = contiguous_like(grad), grad_bias = one_row(grad);
  bias_gelu_backward_out(grad, x, bias, approximate, rung, grad_x, grad_bias);
  return {grad_x, grad_bias};
}

// ---- bias_dropout_residual ----

Tensor& bias_dropout_residual_out(const Tensor& x, const Tensor& bias, const Tensor& residual, double dropout_p,
                                  const Tensor& rng_state, string_view rung, Tensor& out) {
  constexpr const char* op = "bias_dropout_residual";
  check_rows(op, "x", x);
  check_like(op, "bias", bias, "x", x, {x.size(-1)});
  check_like(op, "residual", residual, "x", x, x.sizes());
  const uint32_t threshold = threshold_of(op, "dropout_p", dropout_p);
  const PhiloxArgs philox_args = philox_args_of(op, rng_state, x);
  check_out(op, "out", out, x.sizes(), "x", x);
  check_apart(op, {{"out", out}}, {{"x", x}, {"bias", bias}, {"residual", residual}, {"rng_state", rng_state}});
  check_rung(kBiasDropoutResidual, rung, x);
  if (x.numel() == 0) return out;
  const Tensor contiguous = x.contiguous(), contiguous_bias = bias.contiguous(),
               contiguous_residual = residual.contiguous();
  run(kBiasDropoutResidual, rung, x,
      {contiguous.data_ptr(), contiguous_bias.data_ptr(), contiguous_residual.data_ptr(), out.data_ptr(), rows_of(x),
       x.size(-1), philox_args.in_memory, philox_args.seed, philox_args.offset, threshold, dtype_of(x)});
  return out;
}

Tensor bias_dropout_residual(const Tensor& x, const Tensor& bias, const Tensor& residual, double dropout_p,
                             const Tensor& rng_state, string_view rung) {
  Tensor out = contiguous_like(x);
  return bias_dropout_residual_out(x, bias, residual, dropout_p, rng_state, rung, out);
}

Tensor bias_dropout_residual_autocast(const Tensor& x, const Tensor& bias, const Tensor& residual, double dropout_p,
                                      const Tensor& rng_state, string_view rung) {
  check_floating("bias_dropout_residual", "x", x);
  check_floating("bias_dropout_residual", "bias", bias);
  check_floating("bias_dropout_residual", "residual", residual);
  at::ScalarType widest = x.scalar_type();
  for (const Tensor& t : {bias, residual}) widest = c10::promoteTypes(widest, t.scalar_type());
  return call_in<bias_dropout_residual>(widest, "step1_simple::bias_dropout_residual", x, bias, residual, dropout_p,
                                        rng_state, rung);
}

std::tuple<Tensor&, Tensor&> bias_dropout_residual_backward_out(const Tensor& grad, double dropout_p,
                                                                const Tensor& rng_state, string_view rung,
                                                                Tensor& grad_x, Tensor& grad_bias) {
  constexpr const char* op = "bias_dropout_residual_backward";
  check_rows(op, "grad", grad);
  const uint32_t threshold = threshold_of(op, "dropout_p", dropout_p);
  const PhiloxArgs philox_args = philox_args_of(op, rng_state, grad);
  check_out(op, "grad_x", grad_x, grad.sizes(), "grad", grad);
  check_out(op, "grad_bias", grad_bias, {grad.size(-1)}, "grad", grad);
  check_apart(op, {{"grad_x", grad_x}, {"grad_bias", grad_bias}}, {{"grad", grad}, {"rng_state", rng_state}});
  check_rung(kBiasDropoutResidualBackward, rung, grad);
  if (grad.numel() == 0) {
    grad_bias.zero_();
    return {grad_x, grad_bias};
  }
  const Tensor contiguous = grad.contiguous();
  run(kBiasDropoutResidualBackward, rung, grad,
      {contiguous.data_ptr(), grad_x.data_ptr(), grad_bias.data_ptr(), rows_of(grad), grad.size(-1),
       philox_args.in_memory, philox_args.seed, philox_args.offset, threshold, dtype_of(grad)});
  return {grad_x, grad_bias};
}

std::tuple<Tensor, Tensor> bias_dropout_residual_backward(const Tensor& grad, double dropout_p, const Tensor& rng_state,
                                                          string_view rung) {
  Tensor grad_x = contiguous_like(grad), grad_bias = one_row(grad);
  bias_dropout_residual_backward_out(grad, dropout_p, rng_state, rung, grad_x, grad_bias);
  return {grad_x, grad_bias};
}

// ---- column_sum ----

Tensor& column_sum_out(const Tensor& x, string_view rung, Tensor& out) {
  check_rows("column_sum", "x", x);
  check_out("column_sum", "out", out, {x.size(-1)}, "x", x);
  check_apart("column_sum", {{"out", out}}, {{"x", x}});
  check_rung(kColumnSum, rung, x);
  if (x.numel() == 0) return out.zero_();
  const Tensor contiguous = x.contiguous();
  run(kColumnSum, rung, x, {contiguous.data_ptr(), out.data_ptr(), rows_of(x), x.size(-1), dtype_of(x)});
  return out;
}

Tensor column_sum(const Tensor& x, string_view rung) {
  Tensor out = one_row(x);
  return column_sum_out(x, rung, out);
}

std::vector<OpInfo> ops() {
  return {describe(kScale),
          describe(kGelu),
          describe(kGeluScale),
          describe(kGeluBackward),
          describe(kBiasGelu),
          describe(kBiasGeluBackward),
          describe(kBiasDropoutResidual),
          describe(kBiasDropoutResidualBackward),
          describe(kColumnSum)};
}

}  // namespace kf::step1
