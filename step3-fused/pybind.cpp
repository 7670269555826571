// Registrations: the module that Python imports, and the ops that torch knows. Shapes (fake tensors) and gradients are
// added in Python, in step3_fused/__init__.py.
#include <kf/define_op.h>
#include <kf/dropout.h>
#include <kf/python.h>

#include "host/fused_host.h"

namespace kf::simt {
std::uint64_t launch_count();  // of emulator/include/kf_simt.h, whose folder only emulated sources see
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  kf::define_questions(m, kf::step3::ops());
  m.def("emulated_kernels", &kf::simt::launch_count);
}

TORCH_LIBRARY(step3_fused, m) {
  using namespace kf::step3;
  using kf::Autocast;
  const kf::Ops step{m, "step3_fused"};
  step.define<layer_norm>("layer_norm(Tensor x, Tensor weight, Tensor bias, *, float eps=1e-05, bool keep=True",
                          {"y", "mean", "rstd"}, Autocast::kToFloat32);
  step.define<layer_norm_backward>(
      "layer_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor mean, Tensor rstd, Tensor? grad_sum=None, *",
      {"grad_x", "grad_weight", "grad_bias"});
  step.define<residual_layer_norm>(
      "residual_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor bias, Tensor? x_bias=None, "
      "float dropout_p=0.0, Tensor? rng_state=None, *, float eps=1e-05, bool keep=True",
      {"y", "sum", "mean", "rstd"}, Autocast::kToFloat32);
  step.define<attention_residual_layer_norm>(
      "attention_residual_layer_norm(Tensor q, Tensor k, Tensor v, Tensor residual, Tensor weight, Tensor bias, "
      "Tensor? key_begin=None, Tensor? key_end=None, Tensor? attention_rng_state=None, *, bool causal=False, "
      "float? scale=None, float eps=1e-05, float attention_dropout_p=0.0, bool keep=True",
      {"out", "attended", "lse", "mean", "rstd"}, Autocast::kToItsDtype);
  step.define<attention_block>(
      "attention_block(Tensor q, Tensor k, Tensor v, Tensor residual, Tensor proj_weight, Tensor proj_bias, "
      "Tensor weight, Tensor bias, Tensor? key_begin=None, Tensor? key_end=None, Tensor? rng_state=None, "
      "Tensor? attention_rng_state=None, Tensor? cu_seqlens=None, *, bool causal=False, float? scale=None, "
      "float eps=1e-05, float dropout_p=0.0, float attention_dropout_p=0.0, bool keep=True",
      {"y", "sum", "attended", "lse", "mean", "rstd"}, Autocast::kToItsDtype);
  step.define<linear_gelu>(
      "linear_gelu(Tensor x, Tensor weight, Tensor? bias=None, *, bool transposed=False, "
      "str approximate=\"tanh\", bool keep=True",
      {"y", "preactivation"}, Autocast::kToItsDtype);
  step.define<linear_gelu_backward>(
      "linear_gelu_backward(Tensor grad, Tensor preactivation, Tensor x, "
      "Tensor weight, *, bool transposed=False, str approximate=\"tanh\"",
      {"grad_x", "grad_weight", "grad_bias"});
  step.define<gelu_linear>(
      "gelu_linear(Tensor x, Tensor weight, Tensor? bias=None, *, bool transposed=False, "
      "str approximate=\"tanh\"",
      {"y"}, Autocast::kToItsDtype);
  step.define<gelu_linear_backward>(
      "gelu_linear_backward(Tensor grad, Tensor x, Tensor weight, *, "
      "bool transposed=False, str approximate=\"tanh\"",
      {"grad_x", "grad_weight", "grad_bias"});
  step.define<layer_norm_linear>(
      "layer_norm_linear(Tensor x, Tensor norm_weight, Tensor norm_bias, Tensor weight, "
      "Tensor? bias=None, *, bool transposed=False, float eps=1e-05",
      {"y", "mean", "rstd"}, Autocast::kToItsDtype);
  step.define<linear_bias_dropout_residual>(
      "linear_bias_dropout_residual(Tensor x, Tensor weight, Tensor? bias, "
      "Tensor residual, float dropout_p, Tensor rng_state, *, "
      "bool transposed=False",
      {"y"}, Autocast::kToItsDtype);
  step.define<linear_bias_dropout_residual_backward>(
      "linear_bias_dropout_residual_backward(Tensor grad, Tensor x, Tensor weight, float dropout_p, Tensor rng_state, "
      "*, bool transposed=False",
      {"grad_x", "grad_weight", "grad_bias"});
  step.define<mlp>(
      "mlp(Tensor x, Tensor weight_1, Tensor bias_1, Tensor weight_2, Tensor bias_2, "
      "Tensor? residual=None, *, bool transposed=False, str approximate=\"tanh\", bool keep=True",
      {"y", "preactivation"}, Autocast::kToItsDtype);
  m.def("draw_rng_state(Tensor x, *, bool on_device) -> Tensor", {at::Tag::nondeterministic_seeded});
  for (const auto key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {
    m.impl("draw_rng_state", torch::dispatch(key, &kf::draw_rng_state));
  }
  kf::watch_writes(m, "step3_fused");
}
