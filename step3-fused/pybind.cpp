// Registrations: the module that Python imports, and the ops that torch knows. Shapes (fake tensors) and gradients are
// added in Python, in step3_fused/__init__.py.
#include <kf/dropout.h>
#include <kf/python.h>
#include <torch/library.h>

#include "host/fused_host.h"
#include "host/linear_host.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  kf::define_questions(m, kf::step3::ops());
  m.def("emulated_kernels", &kf::step3::emulated_kernels);
}

TORCH_LIBRARY(step3_fused, m) {
  m.def(
      "layer_norm(Tensor x, Tensor weight, Tensor bias, *, float eps=1e-05, bool keep=True, str rung=\"auto\") -> "
      "(Tensor, Tensor, Tensor)");
  m.def(
      "layer_norm.out(Tensor x, Tensor weight, Tensor bias, *, float eps=1e-05, bool keep=True, str rung=\"auto\", "
      "Tensor(a!) y, Tensor(b!) mean, Tensor(c!) rstd) -> (Tensor(a!), Tensor(b!), Tensor(c!))");
  m.def(
      "layer_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor mean, Tensor rstd, Tensor? grad_sum=None, *, "
      "str rung=\"auto\") -> (Tensor, Tensor, Tensor)");
  m.def(
      "layer_norm_backward.out(Tensor grad, Tensor x, Tensor weight, Tensor mean, Tensor rstd, Tensor? grad_sum=None, "
      "*, str rung=\"auto\", Tensor(a!) grad_x, Tensor(b!) grad_weight, Tensor(c!) grad_bias) -> "
      "(Tensor(a!), Tensor(b!), Tensor(c!))");
  m.def(
      "residual_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor bias, Tensor? x_bias=None, float "
      "dropout_p=0.0, "
      "Tensor? rng_state=None, *, float eps=1e-05, bool keep=True, str rung=\"auto\") -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "residual_layer_norm.out(Tensor x, Tensor residual, Tensor weight, Tensor bias, Tensor? x_bias=None, "
      "float dropout_p=0.0, Tensor? rng_state=None, *, float eps=1e-05, bool keep=True, str rung=\"auto\", Tensor(a!) "
      "y, "
      "Tensor(b!) sum, Tensor(c!) mean, Tensor(d!) rstd) -> "
      "(Tensor(a!), Tensor(b!), Tensor(c!), Tensor(d!))");
  m.def(
      "attention_residual_layer_norm(Tensor q, Tensor k, Tensor v, Tensor residual, Tensor weight, Tensor "
      "bias, Tensor? key_begin=None, Tensor? key_end=None, Tensor? attention_rng_state=None, *, bool "
      "causal=False, float? scale=None, float eps=1e-05, float attention_dropout_p=0.0, bool keep=True, str "
      "rung=\"auto\") -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "attention_residual_layer_norm.out(Tensor q, Tensor k, Tensor v, Tensor residual, Tensor weight, "
      "Tensor bias, Tensor? key_begin=None, Tensor? key_end=None, Tensor? attention_rng_state=None, *, bool "
      "causal=False, float? scale=None, float eps=1e-05, float attention_dropout_p=0.0, bool keep=True, str "
      "rung=\"auto\", Tensor(a!) out, Tensor(b!) attended, Tensor(c!) lse, Tensor(d!) mean, Tensor(e!) "
      "rstd) -> (Tensor(a!), Tensor(b!), Tensor(c!), Tensor(d!), Tensor(e!))");
  m.def(
      "attention_block(Tensor q, Tensor k, Tensor v, Tensor residual, Tensor proj_weight, Tensor proj_bias, "
      "Tensor weight, Tensor bias, Tensor? key_begin=None, Tensor? key_end=None, Tensor? rng_state=None, "
      "Tensor? attention_rng_state=None, *, bool causal=False, float? scale=None, float eps=1e-05, float "
      "dropout_p=0.0, float attention_dropout_p=0.0, bool keep=True, str rung=\"auto\") -> (Tensor, Tensor, Tensor, "
      "Tensor, "
      "Tensor, Tensor)");
  m.def(
      "attention_block.out(Tensor q, Tensor k, Tensor v, Tensor residual, Tensor proj_weight, Tensor "
      "proj_bias, Tensor weight, Tensor bias, Tensor? key_begin=None, Tensor? key_end=None, Tensor? "
      "rng_state=None, Tensor? attention_rng_state=None, *, bool causal=False, float? scale=None, float "
      "eps=1e-05, float dropout_p=0.0, float attention_dropout_p=0.0, bool keep=True, str rung=\"auto\", Tensor(a!) y, "
      "Tensor(b!) sum, Tensor(c!) attended, Tensor(d!) lse, Tensor(e!) mean, Tensor(f!) rstd) -> "
      "(Tensor(a!), Tensor(b!), Tensor(c!), Tensor(d!), Tensor(e!), Tensor(f!))");
  m.def("draw_rng_state(Tensor x, *, bool on_device) -> Tensor", {at::Tag::nondeterministic_seeded});
  m.def(
      "linear_gelu(Tensor x, Tensor weight, Tensor? bias=None, *, bool transposed=False, str "
      "approximate=\"tanh\", bool keep=True, str rung=\"auto\") -> (Tensor, Tensor)");
  m.def(
      "linear_gelu.out(Tensor x, Tensor weight, Tensor? bias=None, *, bool transposed=False, str "
      "approximate=\"tanh\", bool keep=True, str rung=\"auto\", Tensor(a!) y, Tensor(b!) preactivation) -> "
      "(Tensor(a!), Tensor(b!))");
  m.def(
      "linear_gelu_backward(Tensor grad, Tensor preactivation, Tensor x, Tensor weight, *, bool "
      "transposed=False, str approximate=\"tanh\", str rung=\"auto\") -> (Tensor, Tensor, Tensor)");
  m.def(
      "linear_gelu_backward.out(Tensor grad, Tensor preactivation, Tensor x, Tensor weight, *, bool "
      "transposed=False, str approximate=\"tanh\", str rung=\"auto\", Tensor(a!) grad_x, Tensor(b!) grad_weight, "
      "Tensor(c!) grad_bias) -> (Tensor(a!), Tensor(b!), Tensor(c!))");
  m.def(
      "gelu_linear(Tensor x, Tensor weight, Tensor? bias=None, *, bool transposed=False, str "
      "approximate=\"tanh\", str rung=\"auto\") -> Tensor");
  m.def(
      "gelu_linear.out(Tensor x, Tensor weight, Tensor? bias=None, *, bool transposed=False, str "
      "approximate=\"tanh\", str rung=\"auto\", Tensor(a!) y) -> Tensor(a!)");
  m.def(
      "gelu_linear_backward(Tensor grad, Tensor x, Tensor weight, *, bool transposed=False, str "
      "approximate=\"tanh\", str rung=\"auto\") -> (Tensor, Tensor, Tensor)");
  m.def(
      "gelu_linear_backward.out(Tensor grad, Tensor x, Tensor weight, *, bool transposed=False, str "
      "approximate=\"tanh\", str rung=\"auto\", Tensor(a!) grad_x, Tensor(b!) grad_weight, Tensor(c!) grad_bias) "
      "-> (Tensor(a!), Tensor(b!), Tensor(c!))");
  m.def(
      "layer_norm_linear(Tensor x, Tensor norm_weight, Tensor norm_bias, Tensor weight, Tensor? bias=None, *, "
      "bool transposed=False, float eps=1e-05, str rung=\"auto\") -> (Tensor, Tensor, Tensor)");
  m.def(
      "layer_norm_linear.out(Tensor x, Tensor norm_weight, Tensor norm_bias, Tensor weight, Tensor? bias=None, "
      "*, bool transposed=False, float eps=1e-05, str rung=\"auto\", Tensor(a!) y, Tensor(b!) mean, Tensor(c!) "
      "rstd) -> (Tensor(a!), Tensor(b!), Tensor(c!))");
  m.def(
      "linear_bias_dropout_residual(Tensor x, Tensor weight, Tensor? bias, Tensor residual, float dropout_p, Tensor "
      "rng_state, *, bool transposed=False, str rung=\"auto\") -> Tensor");
  m.def(
      "linear_bias_dropout_residual.out(Tensor x, Tensor weight, Tensor? bias, Tensor residual, float dropout_p, "
      "Tensor rng_state, *, bool transposed=False, str rung=\"auto\", Tensor(a!) y) -> Tensor(a!)");
  m.def(
      "linear_bias_dropout_residual_backward(Tensor grad, Tensor x, Tensor weight, float dropout_p, Tensor rng_state, "
      "*, bool transposed=False, str rung=\"auto\") -> (Tensor, Tensor, Tensor)");
  m.def(
      "linear_bias_dropout_residual_backward.out(Tensor grad, Tensor x, Tensor weight, float dropout_p, Tensor "
      "rng_state, *, bool transposed=False, str rung=\"auto\", Tensor(a!) grad_x, Tensor(b!) grad_weight, "
      "Tensor(c!) grad_bias) -> (Tensor(a!), Tensor(b!), Tensor(c!))");
  m.def(
      "mlp(Tensor x, Tensor weight_1, Tensor bias_1, Tensor weight_2, Tensor bias_2, Tensor? residual=None, *, "
      "bool transposed=False, str approximate=\"tanh\", bool keep=True, str rung=\"auto\") -> (Tensor, Tensor)");
  m.def(
      "mlp.out(Tensor x, Tensor weight_1, Tensor bias_1, Tensor weight_2, Tensor bias_2, Tensor? "
      "residual=None, *, bool transposed=False, str approximate=\"tanh\", bool keep=True, str rung=\"auto\", "
      "Tensor(a!) y, Tensor(b!) preactivation) -> (Tensor(a!), Tensor(b!))");
  kf::watch_writes(m, "step3_fused");
}

namespace {
void register_all(torch::Library& m) {
  m.impl("layer_norm", kf::step3::layer_norm);
  m.impl("layer_norm.out", kf::step3::layer_norm_out);
  m.impl("layer_norm_backward", kf::step3::layer_norm_backward);
  m.impl("layer_norm_backward.out", kf::step3::layer_norm_backward_out);
  m.impl("residual_layer_norm", kf::step3::residual_layer_norm);
  m.impl("residual_layer_norm.out", kf::step3::residual_layer_norm_out);
  m.impl("attention_residual_layer_norm", kf::step3::attention_residual_layer_norm);
  m.impl("attention_residual_layer_norm.out", kf::step3::attention_residual_layer_norm_out);
  m.impl("attention_block", kf::step3::attention_block);
  m.impl("attention_block.out", kf::step3::attention_block_out);
  m.impl("draw_rng_state", kf::draw_rng_state);
  m.impl("linear_gelu", kf::step3::linear_gelu);
  m.impl("linear_gelu.out", kf::step3::linear_gelu_out);
  m.impl("linear_gelu_backward", kf::step3::linear_gelu_backward);
  m.impl("linear_gelu_backward.out", kf::step3::linear_gelu_backward_out);
  m.impl("gelu_linear", kf::step3::gelu_linear);
  m.impl("gelu_linear.out", kf::step3::gelu_linear_out);
  m.impl("gelu_linear_backward", kf::step3::gelu_linear_backward);
  m.impl("gelu_linear_backward.out", kf::step3::gelu_linear_backward_out);
  m.impl("layer_norm_linear", kf::step3::layer_norm_linear);
  m.impl("layer_norm_linear.out", kf::step3::layer_norm_linear_out);
  m.impl("linear_bias_dropout_residual", kf::step3::linear_bias_dropout_residual);
  m.impl("linear_bias_dropout_residual.out", kf::step3::linear_bias_dropout_residual_out);
  m.impl("linear_bias_dropout_residual_backward", kf::step3::linear_bias_dropout_residual_backward);
  m.impl("linear_bias_dropout_residual_backward.out", kf::step3::linear_bias_dropout_residual_backward_out);
  m.impl("mlp", kf::step3::mlp);
  m.impl("mlp.out", kf::step3::mlp_out);
}
}  // namespace

TORCH_LIBRARY_IMPL(step3_fused, CPU, m) { register_all(m); }
TORCH_LIBRARY_IMPL(step3_fused, CUDA, m) { register_all(m); }

namespace {
// Backward passes need none: they keep the dtype that they get, and get what the forward pass had.
void register_autocast(torch::Library& m) {
  m.impl("layer_norm", kf::step3::layer_norm_autocast);
  m.impl("residual_layer_norm", kf::step3::residual_layer_norm_autocast);
  m.impl("attention_residual_layer_norm", kf::step3::attention_residual_layer_norm_autocast);
  m.impl("attention_block", kf::step3::attention_block_autocast);
  m.impl("linear_gelu", kf::step3::linear_gelu_autocast);
  m.impl("gelu_linear", kf::step3::gelu_linear_autocast);
  m.impl("layer_norm_linear", kf::step3::layer_norm_linear_autocast);
  m.impl("linear_bias_dropout_residual", kf::step3::linear_bias_dropout_residual_autocast);
  m.impl("mlp", kf::step3::mlp_autocast);
}
}  // namespace

TORCH_LIBRARY_IMPL(step3_fused, AutocastCPU, m) { register_autocast(m); }
TORCH_LIBRARY_IMPL(step3_fused, AutocastCUDA, m) { register_autocast(m); }
