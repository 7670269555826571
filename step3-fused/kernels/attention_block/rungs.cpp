#include "rungs.h"

namespace kf::KF_BACKEND::attention_block {
namespace {

// Tensors as large as y: one, and another for attention's output where that is not wanted.
int64_t one_or_two_outputs(const Args& a) {
  const Attention& t = a.attention;
  return (a.attended == nullptr ? 2 : 1) * t.batch * t.q_length * t.heads * t.head_dim * size_of(a.dtype);
}

constexpr Rung<Args> kRungs[] = {
    {"v1_separate", v1_separate, v1_separate_can_implement, one_or_two_outputs,
     "attention's output, its projection and the sum"},
    {"v2_fused", v2_fused, v2_fused_can_implement},
    {"v3_best", v3_best, v3_best_can_implement, v3_best_scratch_bytes,
     "attention's weights, its output, its projection and the sum"},
    {"v4_dataflow", v4_dataflow, v4_dataflow_can_implement, v4_dataflow_scratch_bytes,
     "attention's weights, its output and the sum"},
    {"v5_cluster", v5_cluster, v5_cluster_can_implement, nullptr,
     "attention's weights, its output and, where a block projects in rounds, the sum"},
};

}  // namespace

Rungs<Args> rungs() { return kRungs; }

}  // namespace kf::KF_BACKEND::attention_block
