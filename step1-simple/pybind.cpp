// Two ways to call C++ from Python, and why the second is the one to use.
#include <kf/dropout.h>
#include <kf/python.h>
#include <torch/library.h>

#include "host/simple_host.h"

// The way most tutorials show: a Python function made by pybind11. It works in eager mode. torch.compile cannot look
// inside and knows neither shapes nor gradients, so it breaks the graph here; step1's README shows the break.
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def(
      "scale_by_pybind", [](const at::Tensor& x, double factor) { return kf::step1::scale(x, factor, "auto"); },
      "scale as a plain pybind11 function, for the lesson", pybind11::arg("x"), pybind11::arg("factor"));
  kf::define_questions(m, kf::step1::ops());  // rungs and launch_counts among them
}

// The way torch knows: a schema, then an implementation for each device, and one for autocast where a dtype should
// change. Shapes (fake tensors) and gradients are added in Python, in step1_simple/__init__.py.
TORCH_LIBRARY(step1_simple, m) {
  m.def("scale(Tensor x, float factor, *, str rung=\"auto\") -> Tensor");
  m.def("scale.out(Tensor x, float factor, *, str rung=\"auto\", Tensor(a!) out) -> Tensor(a!)");
  m.def("gelu(Tensor x, *, str approximate=\"tanh\", str rung=\"auto\") -> Tensor");
  m.def("gelu.out(Tensor x, *, str approximate=\"tanh\", str rung=\"auto\", Tensor(a!) out) -> Tensor(a!)");
  m.def("gelu_scale(Tensor x, float factor, *, str approximate=\"tanh\", str rung=\"auto\") -> Tensor");
  m.def(
      "gelu_scale.out(Tensor x, float factor, *, str approximate=\"tanh\", str rung=\"auto\", Tensor(a!) out) -> "
      "Tensor(a!)");
  m.def(
      "gelu_backward(Tensor grad, Tensor x, *, float factor=1.0, str approximate=\"tanh\", str rung=\"auto\") -> "
      "Tensor");
  m.def(
      "gelu_backward.out(Tensor grad, Tensor x, *, float factor=1.0, str approximate=\"tanh\", str rung=\"auto\", "
      "Tensor(a!) out) -> Tensor(a!)");
  m.def("bias_gelu(Tensor x, Tensor bias, *, str approximate=\"tanh\", str rung=\"auto\") -> Tensor");
  m.def(
      "bias_gelu.out(Tensor x, Tensor bias, *, str approximate=\"tanh\", str rung=\"auto\", Tensor(a!) out) -> "
      "Tensor(a!)");
  m.def(
      "bias_gelu_backward(Tensor grad, Tensor x, Tensor bias, *, str approximate=\"tanh\", str rung=\"auto\") -> "
      "(Tensor, Tensor)");
  m.def(
      "bias_gelu_backward.out(Tensor grad, Tensor x, Tensor bias, *, str approximate=\"tanh\", str rung=\"auto\", "
      "Tensor(a!) grad_x, Tensor(b!) grad_bias) -> (Tensor(a!), Tensor(b!))");
  // Draws from a generator, so two calls with the same arguments are not the same: compilers must not merge them.
  m.def("draw_rng_state(Tensor x, *, bool on_device) -> Tensor", {at::Tag::nondeterministic_seeded});
  m.def(
      "bias_dropout_residual(Tensor x, Tensor bias, Tensor residual, float dropout_p, Tensor rng_state, *, str "
      "rung=\"auto\") "
      "-> Tensor");
  m.def(
      "bias_dropout_residual.out(Tensor x, Tensor bias, Tensor residual, float dropout_p, Tensor rng_state, *, "
      "str rung=\"auto\", Tensor(a!) out) -> Tensor(a!)");
  m.def(
      "bias_dropout_residual_backward(Tensor grad, float dropout_p, Tensor rng_state, *, str rung=\"auto\") -> "
      "(Tensor, Tensor)");
  m.def(
      "bias_dropout_residual_backward.out(Tensor grad, float dropout_p, Tensor rng_state, *, str rung=\"auto\", "
      "Tensor(a!) grad_x, Tensor(b!) grad_bias) -> (Tensor(a!), Tensor(b!))");
  m.def("column_sum(Tensor x, *, str rung=\"auto\") -> Tensor");
  m.def("column_sum.out(Tensor x, *, str rung=\"auto\", Tensor(a!) out) -> Tensor(a!)");
  kf::watch_writes(m, "step1_simple");
}

namespace {
void register_all(torch::Library& m) {
  m.impl("scale", kf::step1::scale);
  m.impl("scale.out", kf::step1::scale_out);
  m.impl("gelu", kf::step1::gelu);
  m.impl("gelu.out", kf::step1::gelu_out);
  m.impl("gelu_scale", kf::step1::gelu_scale);
  m.impl("gelu_scale.out", kf::step1::gelu_scale_out);
  m.impl("gelu_backward", kf::step1::gelu_backward);
  m.impl("gelu_backward.out", kf::step1::gelu_backward_out);
  m.impl("bias_gelu", kf::step1::bias_gelu);
  m.impl("bias_gelu.out", kf::step1::bias_gelu_out);
  m.impl("bias_gelu_backward", kf::step1::bias_gelu_backward);
  m.impl("bias_gelu_backward.out", kf::step1::bias_gelu_backward_out);
  m.impl("draw_rng_state", kf::draw_rng_state);
  m.impl("bias_dropout_residual", kf::step1::bias_dropout_residual);
  m.impl("bias_dropout_residual.out", kf::step1::bias_dropout_residual_out);
  m.impl("bias_dropout_residual_backward", kf::step1::bias_dropout_residual_backward);
  m.impl("bias_dropout_residual_backward.out", kf::step1::bias_dropout_residual_backward_out);
  m.impl("column_sum", kf::step1::column_sum);
  m.impl("column_sum.out", kf::step1::column_sum_out);
}

// The others need none: like x * factor, they keep the dtype they get.
void register_autocast(torch::Library& m) {
  m.impl("bias_gelu", kf::step1::bias_gelu_autocast);
  m.impl("bias_dropout_residual", kf::step1::bias_dropout_residual_autocast);
}
}  // namespace

TORCH_LIBRARY_IMPL(step1_simple, CPU, m) { register_all(m); }
TORCH_LIBRARY_IMPL(step1_simple, CUDA, m) { register_all(m); }
TORCH_LIBRARY_IMPL(step1_simple, AutocastCPU, m) { register_autocast(m); }
TORCH_LIBRARY_IMPL(step1_simple, AutocastCUDA, m) { register_autocast(m); }
