// Registrations: the module that Python imports, and the ops that torch knows. Shapes (fake tensors) and gradients are
// added in Python, in step2_attention/__init__.py.
#include <kf/python.h>
#include <torch/library.h>

#include "host/registrations.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { kf::define_questions(m, kf::step2::ops()); }

TORCH_LIBRARY(step2_attention, m) {
  m.def("linear(Tensor x, Tensor weight, Tensor? bias=None, *, bool transposed=False, str rung=\"auto\") -> Tensor");
  m.def(
      "linear.out(Tensor x, Tensor weight, Tensor? bias=None, *, bool transposed=False, str rung=\"auto\", "
      "Tensor(a!) y) -> Tensor(a!)");
  m.def(
      "linear_backward(Tensor grad, Tensor x, Tensor weight, *, bool transposed=False, str rung=\"auto\") -> "
      "(Tensor, Tensor, Tensor)");
  m.def(
      "linear_backward.out(Tensor grad, Tensor x, Tensor weight, *, bool transposed=False, str rung=\"auto\", "
      "Tensor(a!) grad_x, Tensor(b!) grad_weight, Tensor(c!) grad_bias) -> (Tensor(a!), Tensor(b!), "
      "Tensor(c!))");
  m.def("softmax(Tensor x, *, float? scale=None, bool causal=False, str rung=\"auto\") -> Tensor");
  m.def(
      "softmax.out(Tensor x, *, float? scale=None, bool causal=False, str rung=\"auto\", Tensor(a!) out) "
      "-> Tensor(a!)");
  m.def(
      "softmax_backward(Tensor grad, Tensor y, *, float? scale=None, bool causal=False, str rung=\"auto\") -> Tensor");
  m.def(
      "softmax_backward.out(Tensor grad, Tensor y, *, float? scale=None, bool causal=False, str rung=\"auto\", "
      "Tensor(a!) out) -> Tensor(a!)");
  m.def("draw_rng_state(Tensor x, *, bool on_device) -> Tensor", {at::Tag::nondeterministic_seeded});
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor? key_begin=None, Tensor? key_end=None, "
      "Tensor? rng_state=None, Tensor? cu_seqlens=None, Tensor? cu_seqlens_k=None, *, bool causal=False, float? "
      "scale=None, float dropout_p=0.0, str rung=\"auto\") -> "
      "(Tensor out, Tensor lse)");
  m.def(
      "attention.out(Tensor q, Tensor k, Tensor v, Tensor? key_begin=None, Tensor? key_end=None, "
      "Tensor? rng_state=None, Tensor? cu_seqlens=None, Tensor? cu_seqlens_k=None, *, bool causal=False, float? "
      "scale=None, float dropout_p=0.0, str rung=\"auto\", "
      "Tensor(a!) out, Tensor(b!) lse) -> (Tensor(a!) out, Tensor(b!) lse)");
  m.def(
      "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? key_begin=None, "
      "Tensor? key_end=None, Tensor? grad_lse=None, Tensor? rng_state=None, Tensor? cu_seqlens=None, "
      "Tensor? cu_seqlens_k=None, *, bool causal=False, float? scale=None, float dropout_p=0.0, str rung=\"auto\") -> "
      "(Tensor dq, Tensor dk, Tensor dv)");
  m.def(
      "attention_backward.out(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
      "Tensor? key_begin=None, Tensor? key_end=None, Tensor? grad_lse=None, Tensor? rng_state=None, "
      "Tensor? cu_seqlens=None, Tensor? cu_seqlens_k=None, *, bool causal=False, float? scale=None, "
      "float dropout_p=0.0, str rung=\"auto\", Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv) -> "
      "(Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv)");
  m.def(
      "attention_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? key_begin=None, Tensor? key_end=None, "
      "Tensor? block_table=None, *, float? scale=None, str rung=\"auto\") -> (Tensor out, Tensor lse)");
  m.def(
      "attention_decode.out(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? key_begin=None, Tensor? key_end=None, "
      "Tensor? block_table=None, *, float? scale=None, str rung=\"auto\", Tensor(a!) out, Tensor(b!) lse) -> "
      "(Tensor(a!) out, Tensor(b!) lse)");
  kf::watch_writes(m, "step2_attention");
}

namespace {
void register_all(torch::Library& m) {
  kf::step2::register_linear(m);
  kf::step2::register_attention(m);
}
void register_autocast(torch::Library& m) {
  kf::step2::register_linear_autocast(m);
  kf::step2::register_attention_autocast(m);
}
}  // namespace

TORCH_LIBRARY_IMPL(step2_attention, CPU, m) { register_all(m); }
TORCH_LIBRARY_IMPL(step2_attention, CUDA, m) { register_all(m); }
TORCH_LIBRARY_IMPL(step2_attention, AutocastCPU, m) { register_autocast(m); }
TORCH_LIBRARY_IMPL(step2_attention, AutocastCUDA, m) { register_autocast(m); }
