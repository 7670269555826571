// linear_gelu_backward: with grad_h = grad · gelu'(preactivation), grad_x = grad_h · weightᵀ, grad_weight = xᵀ · grad_h
// (weight transposed: grad_hᵀ · x) and grad_bias[c] = the sum of grad_h over the rows. All are contiguous.
#pragma once

#include <kf/rung.h>

namespace kf::linear_gelu_backward {

struct Args {
  const void* grad;           // [rows, width]
  const void* preactivation;  // [rows, width]
  const void* x;              // [rows, depth]
  const void* weight;         // [depth, width], or, transposed, [width, depth]
  void* grad_x;
  void* grad_weight;
  void* grad_bias;
  bool tanh;  // GELU as GPT-2 approximates it, else exact

  int64_t rows;
  int64_t depth;
  int64_t width;
  bool weight_transposed;
  bool tf32;  // float32 may be rounded to TF32 before it is multiplied
  DType dtype;
  void* scratch = nullptr;
};

}  // namespace kf::linear_gelu_backward

// The build compiles kernels and table twice, with KF_BACKEND as gpu and as emulated. Host files see only the tables.
#ifdef KF_BACKEND
namespace kf::KF_BACKEND::linear_gelu_backward {
using kf::linear_gelu_backward::Args;
void v1_separate(const Args& args, void* stream);
std::string v1_separate_can_implement(const Args& args);
int64_t v1_separate_scratch_bytes(const Args& args);
void v2_fused(const Args& args, void* stream);
std::string v2_fused_can_implement(const Args& args);
int64_t v2_fused_scratch_bytes(const Args& args);
}  // namespace kf::KF_BACKEND::linear_gelu_backward
#endif

namespace kf::emulated::linear_gelu_backward {
Rungs<kf::linear_gelu_backward::Args> rungs();
}
namespace kf::gpu::linear_gelu_backward {
#ifdef KF_WITH_CUDA
Rungs<kf::linear_gelu_backward::Args> rungs();
#else
inline Rungs<kf::linear_gelu_backward::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::linear_gelu_backward
