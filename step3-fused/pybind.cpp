// Registrations: the module that Python imports, and the ops that torch knows. Shapes (fake tensors) and gradients are
// added in Python, in step3_fused/__init__.py.
#include <kf/python.h>
#include <torch/library.h>

#include "fused_host.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  kf::define_questions(m, kf::step3::ops());
  m.def("emulated_kernels", &kf::step3::emulated_kernels);
}

TORCH_LIBRARY(step3_fused, m) {
  m.def("layer_norm(Tensor x, Tensor weight, Tensor bias, *, float eps=1e-05, str rung=\"auto\") -> Tensor");
  m.def(
      "layer_norm.out(Tensor x, Tensor weight, Tensor bias, *, float eps=1e-05, str rung=\"auto\", Tensor(a!) out) -> "
      "Tensor(a!)");
  m.def(
      "residual_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor bias, *, float eps=1e-05, "
      "str rung=\"auto\") -> (Tensor, Tensor)");
  m.def(
      "residual_layer_norm.out(Tensor x, Tensor residual, Tensor weight, Tensor bias, *, float eps=1e-05, "
      "str rung=\"auto\", Tensor(a!) y, Tensor(b!) sum) -> (Tensor(a!), Tensor(b!))");
  m.def(
      "attention_residual_layer_norm(Tensor q, Tensor k, Tensor v, Tensor residual, Tensor weight, Tensor bias, *, "
      "bool causal=False, float? scale=None, float eps=1e-05, str rung=\"auto\") -> Tensor");
  m.def(
      "attention_residual_layer_norm.out(Tensor q, Tensor k, Tensor v, Tensor residual, Tensor weight, Tensor bias, *, "
      "bool causal=False, float? scale=None, float eps=1e-05, str rung=\"auto\", Tensor(a!) out) -> Tensor(a!)");
  m.def(
      "attention_block(Tensor q, Tensor k, Tensor v, Tensor residual, Tensor proj_weight, Tensor proj_bias, "
      "Tensor weight, Tensor bias, *, bool causal=False, float? scale=None, float eps=1e-05, str rung=\"auto\") -> "
      "(Tensor, Tensor)");
  m.def(
      "attention_block.out(Tensor q, Tensor k, Tensor v, Tensor residual, Tensor proj_weight, Tensor proj_bias, "
      "Tensor weight, Tensor bias, *, bool causal=False, float? scale=None, float eps=1e-05, str rung=\"auto\", "
      "Tensor(a!) y, Tensor(b!) sum) -> (Tensor(a!), Tensor(b!))");
}

namespace {
void register_all(torch::Library& m) {
  m.impl("layer_norm", kf::step3::layer_norm);
  m.impl("layer_norm.out", kf::step3::layer_norm_out);
  m.impl("residual_layer_norm", kf::step3::residual_layer_norm);
  m.impl("residual_layer_norm.out", kf::step3::residual_layer_norm_out);
  m.impl("attention_residual_layer_norm", kf::step3::attention_residual_layer_norm);
  m.impl("attention_residual_layer_norm.out", kf::step3::attention_residual_layer_norm_out);
  m.impl("attention_block", kf::step3::attention_block);
  m.impl("attention_block.out", kf::step3::attention_block_out);
}
}  // namespace

TORCH_LIBRARY_IMPL(step3_fused, CPU, m) { register_all(m); }
TORCH_LIBRARY_IMPL(step3_fused, CUDA, m) { register_all(m); }

namespace {
void register_autocast(torch::Library& m) {
  m.impl("layer_norm", kf::step3::layer_norm_autocast);
  m.impl("residual_layer_norm", kf::step3::residual_layer_norm_autocast);
  m.impl("attention_residual_layer_norm", kf::step3::attention_residual_layer_norm_autocast);
  m.impl("attention_block", kf::step3::attention_block_autocast);
}
}  // namespace

TORCH_LIBRARY_IMPL(step3_fused, AutocastCPU, m) { register_autocast(m); }
TORCH_LIBRARY_IMPL(step3_fused, AutocastCUDA, m) { register_autocast(m); }
