// Schemas, implementations for each device, and what Python asks about the extension.
#include <kf/python.h>
#include <torch/library.h>

#include "host/integration_host.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { kf::define_questions(m, kf::step4::ops()); }

// `position` grows with every generated token. As a SymInt it may change without torch.compile compiling again.
TORCH_LIBRARY(step4_integration, m) {
  m.def(
      "embedding(Tensor ids, Tensor token_weight, Tensor position_weight, *, SymInt position=0, str rung=\"auto\") -> "
      "Tensor");
  m.def(
      "embedding.out(Tensor ids, Tensor token_weight, Tensor position_weight, *, SymInt position=0, str rung=\"auto\", "
      "Tensor(a!) out) -> Tensor(a!)");
  // (a!) and (b!): the op writes into these arguments and returns nothing.
  m.def(
      "kv_append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, SymInt position, *, str rung=\"auto\") -> "
      "()");
  kf::watch_writes(m, "step4_integration");
}

namespace {
void register_all(torch::Library& m) {
  m.impl("embedding", kf::step4::embedding);
  m.impl("embedding.out", kf::step4::embedding_out);
  m.impl("kv_append", kf::step4::kv_append);
}
}  // namespace

TORCH_LIBRARY_IMPL(step4_integration, CPU, m) { register_all(m); }
TORCH_LIBRARY_IMPL(step4_integration, CUDA, m) { register_all(m); }
