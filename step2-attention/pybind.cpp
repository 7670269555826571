// Registrations: the module that Python imports, and the ops that torch knows. Shapes (fake tensors) and gradients are
// added in Python, in step2_attention/__init__.py.
#include <kf/dropout.h>
#include <kf/python.h>
#include <torch/library.h>

#include "host/attention_host.h"
#include "host/linear_host.h"

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
      "Tensor? rng_state=None, *, bool causal=False, float? scale=None, float dropout_p=0.0, str rung=\"auto\") -> "
      "(Tensor out, Tensor lse)");
  m.def(
      "attention.out(Tensor q, Tensor k, Tensor v, Tensor? key_begin=None, Tensor? key_end=None, "
      "Tensor? rng_state=None, *, bool causal=False, float? scale=None, float dropout_p=0.0, str rung=\"auto\", "
      "Tensor(a!) out, Tensor(b!) lse) -> (Tensor(a!) out, Tensor(b!) lse)");
  m.def(
      "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? key_begin=None, "
      "Tensor? key_end=None, Tensor? grad_lse=None, Tensor? rng_state=None, *, bool causal=False, float? scale=None, "
      "float dropout_p=0.0, str rung=\"auto\") -> (Tensor dq, Tensor dk, Tensor dv)");
  m.def(
      "attention_backward.out(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
      "Tensor? key_begin=None, Tensor? key_end=None, Tensor? grad_lse=None, Tensor? rng_state=None, *, "
      "bool causal=False, float? scale=None, float dropout_p=0.0, str rung=\"auto\", Tensor(a!) dq, Tensor(b!) dk, "
      "Tensor(c!) dv) -> (Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv)");
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
  m.impl("linear", kf::step2::linear);
  m.impl("linear.out", kf::step2::linear_out);
  m.impl("linear_backward", kf::step2::linear_backward);
  m.impl("linear_backward.out", kf::step2::linear_backward_out);
  m.impl("softmax", kf::step2::softmax);
  m.impl("softmax.out", kf::step2::softmax_out);
  m.impl("softmax_backward", kf::step2::softmax_backward);
  m.impl("softmax_backward.out", kf::step2::softmax_backward_out);
  m.impl("draw_rng_state", kf::draw_rng_state);
  m.impl("attention", kf::step2::attention);
  m.impl("attention.out", kf::step2::attention_out);
  m.impl("attention_backward", kf::step2::attention_backward);
  m.impl("attention_backward.out", kf::step2::attention_backward_out);
  m.impl("attention_decode", kf::step2::attention_decode);
  m.impl("attention_decode.out", kf::step2::attention_decode_out);
}
}  // namespace

TORCH_LIBRARY_IMPL(step2_attention, CPU, m) { register_all(m); }
TORCH_LIBRARY_IMPL(step2_attention, CUDA, m) { register_all(m); }

namespace {
// softmax_backward needs none: it keeps the dtype that it gets, and gets what softmax had.
void register_autocast(torch::Library& m) {
  m.impl("linear", kf::step2::linear_autocast);
  m.impl("softmax", kf::step2::softmax_autocast);
  m.impl("attention", kf::step2::attention_autocast);
  m.impl("attention_decode", kf::step2::attention_decode_autocast);
}
}  // namespace

TORCH_LIBRARY_IMPL(step2_attention, AutocastCPU, m) { register_autocast(m); }
TORCH_LIBRARY_IMPL(step2_attention, AutocastCUDA, m) { register_autocast(m); }
