// attention_backward: the gradients of q, k and v, given that of the output; shapes as in ../attention/rungs.h.
//
//   weight[i][j]     = exp(scale · q[i]·k[j] − lse[i])            computed again: scores are never kept
//   Δ[i]             = grad[i]·out[i] − grad_lse[i]
//   grad_score[i][j] = weight[i][j] · (grad[i]·v[j] − Δ[i])
//   dq[i] = scale · Σ_j grad_score[i][j]·k[j]
//   dk[j] = scale · Σ_i grad_score[i][j]·q[i]
//   dv[j] = Σ_i weight[i][j]·grad[i]
//
// With dropout, z being what a weight was multiplied by (../attention/dropout.h): z·grad[i]·v[j] in grad_score, and
// z·weight in dv.
//
// Where a query does not see a key, weight and grad_score are 0, and what the key's row holds is not used. Heads of q
// that share a head of k and v add to the same dk and dv, one after the other.
#pragma once

#include "../attention/rungs.h"

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

}  // namespace kf::attention_backward

#ifdef KF_BACKEND
namespace kf::KF_BACKEND::attention_backward {
using kf::attention_backward::Args;
using kf::attention_backward::Strides;
void v1_naive(const Args& args, void* stream);
void v2_tiled(const Args& args, void* stream);
void v3_mma(const Args& args, void* stream);
void v4_warpgroups(const Args& args, void* stream);
void v5_persistent(const Args& args, void* stream);
void v6_atomics(const Args& args, void* stream);
void v7_turns(const Args& args, void* stream);
void v8_wide(const Args& args, void* stream);

std::string v2_tiled_can_implement(const Args& args);
std::string v3_mma_can_implement(const Args& args);
std::string v4_warpgroups_can_implement(const Args& args);
std::string v5_persistent_can_implement(const Args& args);
std::string v6_atomics_can_implement(const Args& args);
std::string v7_turns_can_implement(const Args& args);
std::string v8_wide_can_implement(const Args& args);

int64_t v1_naive_scratch(const Args& args);
int64_t v4_warpgroups_scratch(const Args& args);
int64_t v5_persistent_scratch(const Args& args);
int64_t v6_atomics_scratch(const Args& args);
int64_t v7_turns_scratch(const Args& args);
int64_t v8_wide_scratch(const Args& args);
int64_t delta_bytes(const Args& args);
}  // namespace kf::KF_BACKEND::attention_backward
#endif

namespace kf::emulated::attention_backward {
Rungs<kf::attention_backward::Args> rungs();
}
namespace kf::gpu::attention_backward {
#ifdef KF_WITH_CUDA
Rungs<kf::attention_backward::Args> rungs();
#else
inline Rungs<kf::attention_backward::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::attention_backward
