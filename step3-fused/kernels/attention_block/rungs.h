// attention_block: what stands between the query projection and the MLP in a GPT-2 block:
//   sum = residual + dropout(attention(q, k, v) · proj_weight + proj_bias);   y = layer_norm(sum)
// The mask is that of step 1's bias_dropout_residual for the same random numbers.
#pragma once

#include <kf/rung.h>
#include <step3/attention.h>

#include "../residual_layer_norm/rungs.h"

namespace kf::attention_block {

struct Args {
  Attention attention;
  const void* residual;     // [batch, q_length, width], contiguous, as y and sum; width = heads·head_dim
  const void* proj_weight;  // [width in, width out]: row k holds what input k adds to each output
  const void* proj_bias;
  const void* weight;
  const void* bias;
  void* y;
  void* sum;
  double eps;
  void* scratch;  // attention's output and its projection, between launches; v4: counters
  DType dtype;
  void* attended = nullptr;  // attention's output, as y; null: not wanted, as the next two
  void* mean = nullptr;      // [batch, q_length], of the sum: float32, or float64 for float64
  void* rstd = nullptr;

  uint32_t threshold = 0;  // of the projection a number is kept where its 16-bit random number is at least this
  const int64_t* rng_state = nullptr;  // {seed, offset} in the GPU's memory; null: the next two members hold them
  uint64_t seed = 0;
  uint64_t offset = 0;
};

// What follows the projection, for rungs with a launch of its own for it.
inline kf::residual_layer_norm::Args normalisation(const Args& a, const void* projected) {
  const Attention& t = a.attention;
  kf::residual_layer_norm::Args rows{};
  rows.x = projected, rows.residual = a.residual, rows.weight = a.weight, rows.bias = a.bias;
  rows.y = a.y, rows.sum = a.sum;
  rows.rows = t.batch * t.q_length, rows.width = t.heads * t.head_dim, rows.eps = a.eps, rows.dtype = a.dtype;
  rows.mean = a.mean, rows.rstd = a.rstd;
  rows.threshold = a.threshold, rows.rng_state = a.rng_state, rows.seed = a.seed, rows.offset = a.offset;
  return rows;
}

// Why a rung with an attention of its own refuses them.
constexpr const char* kNoPackedRows = "takes no packed rows (`cu_seqlens`)";

// What `auto` takes, read off results/h200.json: one launch for few rows of GPT-2 small, and for one text of
// GPT-2 medium; the best launches one after the other elsewhere. GPT-2 XL's one new token is between the two: v5 is
// ahead with 128 keys, and behind with 1024. Where the GPU has no clusters v5's is one block, and nobody has measured
// it. Packed rows are step 2's attention's, in `pieces` alone.
inline const char* automatic(const Args& a, bool clusters) {
  const Attention& t = a.attention;
  const int64_t rows = t.batch * t.q_length, width = t.heads * t.head_dim;
  const bool few = rows <= 128 && t.k_length <= 1024 && (width <= 768 ? t.batch <= 32 : width <= 1024 && t.batch == 1);
  const bool one = width <= 1600 && rows == 1 && t.k_length <= 512;
  const bool packed = t.cu_seqlens != nullptr;
  return (few || one) && !packed && clusters && size_of(a.dtype) == 2 ? "v5_cluster" : "pieces";
}

}  // namespace kf::attention_block

// v3_best: pieces
#define KF_OP attention_block
#define KF_RUNGS(RUNG)                                                                              \
  RUNG(v1_separate, can_implement, scratch_bytes, "attention's output, its projection and the sum") \
  RUNG(v2_fused, can_implement, no_scratch)                                                         \
  RUNG(v4_dataflow, can_implement, scratch_bytes, "attention's weights, its output and the sum")    \
  RUNG(v5_cluster, can_implement, no_scratch,                                                       \
       "attention's weights, its output and, where a block projects in rounds, the sum")            \
  RUNG(pieces, can_implement, scratch_bytes, "attention's weights, its output, its projection and the sum")
#include <kf/rung_list.h>

#ifdef KF_WITH_CUDA
namespace kf::gpu::attention_block {
bool has_clusters();  // the current GPU
}
#endif
