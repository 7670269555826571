// Schemas, implementations for each device, and what Python asks about the extension.
#include <kf/define_op.h>
#include <kf/python.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <string>
#include <tuple>
#include <vector>

#include "host/all_reduce_host.h"
#include "host/cross_entropy_host.h"
#include "host/decode_step_host.h"
#include "host/embedding_backward_host.h"
#include "host/integration_host.h"
#include "host/sample_host.h"

namespace {
// What dictionaries hold, in order: each value's address, and of a tensor its memory, dtype, sizes and strides. As
// bytes, since it is only ever compared: before each prompt, for all modules of a model.
pybind11::bytes places(const std::vector<pybind11::dict>& holders) {
  std::string found;
  const auto add = [&](const auto* values, size_t count) {
    found.append(reinterpret_cast<const char*>(values), count * sizeof *values);
  };
  for (const pybind11::dict& holder : holders) {
    for (const auto& [name, value] : holder) {
      const PyObject* address = value.ptr();
      add(&address, 1);
      if (!THPVariable_Check(value.ptr())) continue;
      const at::Tensor& tensor = THPVariable_Unpack(value.ptr());
      const void* memory = tensor.const_data_ptr();
      const at::ScalarType dtype = tensor.scalar_type();
      add(&memory, 1);
      add(&dtype, 1);
      add(tensor.sizes().data(), tensor.sizes().size());
      add(tensor.strides().data(), tensor.strides().size());
    }
  }
  return found;
}
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  kf::define_questions(m, kf::step4::ops());
  m.def("places", places, "what dictionaries hold and where tensors among it lie, as bytes to compare");
  m.def("all_reduce_bytes", kf::step4::all_reduce_bytes, "how large a worker's buffer must be");
  m.def("all_reduce_header", kf::step4::all_reduce_header, "how many of its bytes begin as zeros");
  m.def("decode_step_bytes", kf::step4::decode_step_bytes, "how large the buffer of a worker must be");
  m.def("decode_step_header", kf::step4::decode_step_header, "how many of its bytes begin as zeros");
  m.def("all_reduce_most", kf::step4::all_reduce_most, "how many workers there may be, and numbers in a row");
}

// `position` grows with every generated token. As a SymInt it may change without torch.compile compiling again.
TORCH_LIBRARY(step4_integration, m) {
  m.def(
      "embedding(Tensor ids, Tensor token_weight, Tensor position_weight, Tensor? positions=None, *, SymInt "
      "position=0, "
      "str rung=\"auto\") -> Tensor");
  m.def(
      "embedding.out(Tensor ids, Tensor token_weight, Tensor position_weight, Tensor? positions=None, *, "
      "SymInt position=0, str rung=\"auto\", Tensor(a!) out) -> Tensor(a!)");
  // (a!) and (b!): the op writes into these arguments and returns nothing.
  m.def(
      "kv_append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, SymInt position, Tensor? positions=None, "
      "*, str rung=\"auto\") -> ()");
  for (const auto& [name, out, returned] :
       {std::tuple("sample", "", "(Tensor, Tensor)"),
        std::tuple("sample.out", ", Tensor(c!) token, Tensor(d!) log_prob", "(Tensor(c!), Tensor(d!))")}) {
    const std::string arguments =
        "(Tensor logits, Tensor(a!)? rng_state=None, Tensor(b!)? seen=None, *, float temperature=1.0, int top_k=0, "
        "float top_p=1.0, float min_p=0.0, float repetition_penalty=1.0, str rung=\"auto\"";
    m.def((name + arguments + out + ") -> " + returned).c_str());
  }
  for (const auto& [name, out, returned] :
       {std::tuple("decode_step", "", "Tensor"), std::tuple("decode_step.out", ", Tensor(f!) logits", "Tensor(f!)")}) {
    const std::string arguments =
        "(Tensor ids, Tensor(a!) end, Tensor begin, Tensor token_weight, Tensor position_weight, Tensor[] weights, "
        "Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor(d!)? packed=None, Tensor(e!)? buffer=None, int[] peers=[], int "
        "rank=0, int[] words=[], *, float? scale=None, bool scale_by_layer=False, float eps=1e-05, str "
        "approximate=\"tanh\", float patience=60.0, str rung=\"auto\"";
    m.def((name + arguments + out + ") -> " + returned).c_str());
  }
  m.def(
      "all_reduce(Tensor x, Tensor x_bias, Tensor residual, Tensor weight, Tensor bias, Tensor(a!) buffer, int[] "
      "peers, "
      "int rank, *, float eps=1e-05, float patience=60.0, str rung=\"auto\") -> (Tensor, Tensor)");
  m.def("decode_pack(Tensor token_weight, Tensor[] weights, *, str rung=\"v4_clusters\") -> Tensor");
  m.def(
      "decode_pack.out(Tensor token_weight, Tensor[] weights, *, str rung=\"v4_clusters\", Tensor(a!) packed) -> "
      "Tensor(a!)");
  m.def("decode_pack_refusal(Tensor token_weight, Tensor[] weights, *, str rung=\"v4_clusters\", int rows=1) -> str");
  m.def("decode_check(Tensor(a!) packed) -> ()");
  const kf::Ops step{m, "step4_integration"};
  step.define<kf::step4::cross_entropy>(
      "cross_entropy(Tensor logits, Tensor targets, *, int ignore_index=-100, bool keep=True", {"loss", "lse", "grad"});
  m.def(
      "cross_entropy_backward_(Tensor(a!) logits, Tensor targets, *, int ignore_index=-100, str rung=\"auto\") -> "
      "Tensor");
  step.define<kf::step4::linear_cross_entropy>(
      "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor targets, *, int ignore_index=-100, int? chunk=None, "
      "bool keep_hidden=True, bool keep_weight=True",
      {"loss", "scale", "grad_hidden", "grad_weight"}, kf::Autocast::kToItsDtype);
  step.define<kf::step4::embedding_backward>("embedding_backward(Tensor grad, Tensor ids, SymInt vocab, *", {"out"});
  kf::watch_writes(m, "step4_integration");
}

namespace {
void register_all(torch::Library& m) {
  m.impl("embedding", kf::step4::embedding);
  m.impl("embedding.out", kf::step4::embedding_out);
  m.impl("kv_append", kf::step4::kv_append);
  m.impl("decode_step", kf::step4::decode_step);
  m.impl("decode_step.out", kf::step4::decode_step_out);
  m.impl("all_reduce", kf::step4::all_reduce);
  m.impl("decode_pack", kf::step4::decode_pack);
  m.impl("decode_pack.out", kf::step4::decode_pack_out);
  m.impl("decode_pack_refusal", kf::step4::decode_pack_refusal);
  m.impl("decode_check", kf::step4::decode_check);
  m.impl("sample", kf::step4::sample);
  m.impl("sample.out", kf::step4::sample_out);
  m.impl("cross_entropy_backward_", kf::step4::cross_entropy_backward_);
}
}  // namespace

TORCH_LIBRARY_IMPL(step4_integration, CPU, m) { register_all(m); }
TORCH_LIBRARY_IMPL(step4_integration, CUDA, m) { register_all(m); }
