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

}  // namespace kf::attention_residual_layer_norm

// The build compiles kernels and table twice, with KF_BACKEND as gpu and as emulated. Host files see only the tables.
#ifdef KF_BACKEND
namespace kf::KF_BACKEND::attention_residual_layer_norm {
using kf::attention_residual_layer_norm::Args;
void v1_separate(const Args& args, void* stream);
void v2_fused(const Args& args, void* stream);
void v3_best(const Args& args, void* stream);
void v4_heads(const Args& args, void* stream);
std::string v1_separate_supports(const Args& args);
std::string v2_fused_supports(const Args& args);
std::string v3_best_supports(const Args& args);
int64_t v3_best_scratch_bytes(const Args& args);
std::string v4_heads_supports(const Args& args);
}  // namespace kf::KF_BACKEND::attention_residual_layer_norm
#endif

namespace kf::emulated::attention_residual_layer_norm {
Rungs<kf::attention_residual_layer_norm::Args> rungs();
}
namespace kf::gpu::attention_residual_layer_norm {
#ifdef KF_WITH_CUDA
Rungs<kf::attention_residual_layer_norm::Args> rungs();
#else
inline Rungs<kf::attention_residual_layer_norm::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::attention_residual_layer_norm
