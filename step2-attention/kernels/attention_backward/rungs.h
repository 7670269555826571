// attention_backward: the gradients of q, k and v, given that of the output; shapes as in ../attention/rungs.h.
//
//   weight[i][j]     = exp(scale · q[i]·k[j] − lse[i])            computed again: scores are never kept
//   Δ[i]             = grad[i]·out[i] − grad_lse[i]
//   grad_score[i][j] = weight[i][j] · (grad[i]·v[j] − Δ[i])
//   dq[i] = scale · Σ_j grad_score[i][j]·k[j]
//   dk[j] = scale · Σ_i grad_score[i][j]·q[i]
//   dv[j] = Σ_i weight[i][j]·grad[i]
//
// With dropout, z being what a weight was multiplied by (step2/attention/dropout.h): z·grad[i]·v[j] in grad_score, and
// z·weight in dv.
//
// Where a query does not see a key, weight and grad_score are 0, and what the key's row holds is not used. Heads of q
// that share a head of k and v add to the same dk and dv, one after the other.
#pragma once

#include <step2/attention/args.h>

namespace kf::attention_backward {

using kf::attention::Strides;

// `out` and `lse` are attention's results, and are only read.
struct Args : kf::attention::Args {
  const void* grad;      // of out
  const void* grad_lse;  // [B, H, Sq], contiguous, of lse's dtype; or null: 0
  void* dq;
  void* dk;
  void* dv;
  Strides grad_stride;
  Strides dq_stride;
  Strides dk_stride;
  Strides dv_stride;
};

// What `auto` takes on a GPU, read off results/h200.json.
inline const char* automatic(const Args& a) { return a.head_dim <= 64 ? "v7_turns" : "v8_wide"; }

}  // namespace kf::attention_backward

#define KF_OP attention_backward
#define KF_RUNGS(RUNG)                                                                    \
  RUNG(v1_naive, always, scratch_bytes)                                                   \
  RUNG(v2_tiled, can_implement, scratch_bytes)                                            \
  RUNG(v3_mma, can_implement, scratch_bytes, "the weights and their gradients")           \
  RUNG(v4_warpgroups, can_implement, scratch_bytes, "the weights and their gradients")    \
  RUNG(v5_persistent, can_implement, scratch_bytes, "the weights and their gradients")    \
  RUNG(v6_atomics, can_implement, scratch_bytes, "the weights and their gradients", true) \
  RUNG(v7_turns, can_implement, scratch_bytes, "the weights and their gradients")         \
  RUNG(v8_wide, can_implement, scratch_bytes, "the weights and their gradients")
#include <kf/rung_list.h>
