// Two ways to call C++ from Python, and why the second is the one to use.
#include <kf/host.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "simple_host.h"

// The way most tutorials show: a Python function made by pybind11. It works in eager mode. torch.compile cannot look
// inside and knows neither shapes nor gradients, so it breaks the graph here; step1's README shows the break.
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def(
      "scale_by_pybind", [](const at::Tensor& x, double factor) { return kf::step1::scale(x, factor, "auto"); },
      "scale as a plain pybind11 function, for the lesson", pybind11::arg("x"), pybind11::arg("factor"));
  m.def("rungs", &kf::step1::rungs, "the names an op accepts as `rung`", pybind11::arg("op"), pybind11::arg("on_gpu"));
  m.def("launch_counts", &kf::launch_counts, "how often each backend ran an op of this stage");
}

// The way torch knows: a schema, then an implementation for each device, and one for autocast where a dtype should
// change. Shapes (fake tensors) and gradients are added in Python, in step1_simple/__init__.py.
TORCH_LIBRARY(step1_simple, m) {
  m.def("scale(Tensor x, float factor, *, str rung=\"auto\") -> Tensor");
  m.def("scale.out(Tensor x, float factor, *, str rung=\"auto\", Tensor(a!) out) -> Tensor(a!)");
  m.def("bias_gelu(Tensor x, Tensor bias, *, str approximate=\"tanh\", str rung=\"auto\") -> Tensor");
  m.def(
      "bias_gelu.out(Tensor x, Tensor bias, *, str approximate=\"tanh\", str rung=\"auto\", Tensor(a!) out) -> "
      "Tensor(a!)");
}

namespace {
void register_all(torch::Library& m) {
  m.impl("scale", kf::step1::scale);
  m.impl("scale.out", kf::step1::scale_out);
  m.impl("bias_gelu", kf::step1::bias_gelu);
  m.impl("bias_gelu.out", kf::step1::bias_gelu_out);
}
}  // namespace

TORCH_LIBRARY_IMPL(step1_simple, CPU, m) { register_all(m); }
TORCH_LIBRARY_IMPL(step1_simple, CUDA, m) { register_all(m); }

// `scale` needs none: like x * factor, it keeps the dtype it gets.
TORCH_LIBRARY_IMPL(step1_simple, AutocastCPU, m) { m.impl("bias_gelu", kf::step1::bias_gelu_autocast); }
TORCH_LIBRARY_IMPL(step1_simple, AutocastCUDA, m) { m.impl("bias_gelu", kf::step1::bias_gelu_autocast); }
