// Registrations: the module that Python imports, and the ops that torch knows. Shapes (fake tensors) and gradients are
// added in Python, in step2_attention/__init__.py.
#include <kf/python.h>
#include <torch/library.h>

#include "attention_host.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { kf::define_questions(m, kf::step2::ops()); }

TORCH_LIBRARY(step2_attention, m) {
  m.def("softmax(Tensor x, *, str rung=\"auto\") -> Tensor");
  m.def("softmax.out(Tensor x, *, str rung=\"auto\", Tensor(a!) out) -> Tensor(a!)");
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor? key_begin=None, Tensor? key_end=None, *, bool causal=False, "
      "float? scale=None, str rung=\"auto\") -> (Tensor out, Tensor lse)");
  m.def(
      "attention.out(Tensor q, Tensor k, Tensor v, Tensor? key_begin=None, Tensor? key_end=None, *, bool causal=False, "
      "float? scale=None, str rung=\"auto\", Tensor(a!) out, Tensor(b!) lse) -> (Tensor(a!) out, Tensor(b!) lse)");
}

namespace {
void register_all(torch::Library& m) {
  m.impl("softmax", kf::step2::softmax);
  m.impl("softmax.out", kf::step2::softmax_out);
  m.impl("attention", kf::step2::attention);
  m.impl("attention.out", kf::step2::attention_out);
}
}  // namespace

TORCH_LIBRARY_IMPL(step2_attention, CPU, m) { register_all(m); }
TORCH_LIBRARY_IMPL(step2_attention, CUDA, m) { register_all(m); }

namespace {
void register_autocast(torch::Library& m) {
  m.impl("softmax", kf::step2::softmax_autocast);
  m.impl("attention", kf::step2::attention_autocast);
}
}  // namespace

TORCH_LIBRARY_IMPL(step2_attention, AutocastCPU, m) { register_autocast(m); }
TORCH_LIBRARY_IMPL(step2_attention, AutocastCUDA, m) { register_autocast(m); }
