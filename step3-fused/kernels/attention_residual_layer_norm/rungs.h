// attention_residual_layer_norm: y = layer_norm(attention(q, k, v) + residual) over the whole width heads·head_dim.
#pragma once

#include <kf/rung.h>
#include <step3/attention.h>

#include "../residual_layer_norm/rungs.h"

namespace kf::attention_residual_layer_norm {

struct Args {
  Attention attention;
  const void* residual;  // [batch, q_length, heads·head_dim], contiguous, as y
  const void* weight;
  const void* bias;
  void* y;
  double eps;
  void* scratch;  // attention's output and the sum, between launches
  DType dtype;
  void* attended = nullptr;  // attention's output, as y; null: not wanted, as the next two
  void* mean = nullptr;      // [batch, q_length], of the sum: float32, or float64 for float64
  void* rstd = nullptr;
};

// What follows attention, for rungs with a launch of its own for it.
inline kf::residual_layer_norm::Args normalisation(const Args& a, const void* attended, void* sum) {
  const Attention& t = a.attention;
  return {attended, a.residual, a.weight, a.bias, a.y, sum, t.batch * t.q_length, t.heads * t.head_dim,
          a.eps,    a.dtype,    a.mean,   a.rstd};
}

// What `auto` takes, read off results/h200.json and, for one new token, h100-80gb-hbm3.json: one launch for few rows of
// GPT-2 small, and for one new token of any GPT-2 against 128 keys; the best launches one after the other elsewhere.
// Where the GPU has no clusters v4's is one block, and nobody has measured it.
inline const char* automatic(const Args& a, bool clusters) {
  const Attention& t = a.attention;
  const int64_t rows = t.batch * t.q_length, width = t.heads * t.head_dim;
  const bool few = rows <= 128 && t.k_length <= 1024 && width <= 768 && t.batch <= 32;
  const bool one = t.q_length == 1 && t.k_length <= 128 && width <= 1600 && t.batch <= 32;
  return (few || one) && clusters && size_of(a.dtype) == 2 ? "v4_heads" : "pieces";
}

}  // namespace kf::attention_residual_layer_norm

// v3_best: pieces
#define KF_OP attention_residual_layer_norm
#define KF_RUNGS(RUNG)                                                              \
  RUNG(v1_separate, can_implement, scratch_bytes, "attention's output and the sum") \
  RUNG(v2_fused, can_implement, no_scratch)                                         \
  RUNG(v4_heads, can_implement, no_scratch, "attention's weights and the sum")      \
  RUNG(pieces, can_implement, scratch_bytes, "attention's weights, its output and the sum")
#include <kf/rung_list.h>
