// layer_norm_linear: y = layer_norm(x) · weight + bias, [rows, width], LayerNorm over the depth. All are contiguous.
#pragma once

#include <kf/rung.h>

namespace kf::layer_norm_linear {

struct Args {
  const void* x;       // [rows, depth]
  const void* weight;  // [depth, width], or, transposed, [width, depth]
  const void* bias;    // [width], or null

  const void* norm_weight;  // [depth]
  const void* norm_bias;    // [depth]
  void* y;
  void* mean;  // of each row, float (double for float64): for the backward pass
  void* rstd;
  double eps;

  int64_t rows;
  int64_t depth;
  int64_t width;
  bool weight_transposed;
  bool tf32;  // float32 may be rounded to TF32 before it is multiplied
  DType dtype;
  void* scratch = nullptr;
};

}  // namespace kf::layer_norm_linear

// v2_mma, v3_hopper: gelu_linear's v3_hopper has the prologue

// The build compiles kernels and table twice, with KF_BACKEND as gpu and as emulated. Host files see only the tables.
#ifdef KF_BACKEND
namespace kf::KF_BACKEND::layer_norm_linear {
using kf::layer_norm_linear::Args;
void v1_separate(const Args& args, void* stream);
std::string v1_separate_can_implement(const Args& args);
int64_t v1_separate_scratch_bytes(const Args& args);
}  // namespace kf::KF_BACKEND::layer_norm_linear
#endif

namespace kf::emulated::layer_norm_linear {
Rungs<kf::layer_norm_linear::Args> rungs();
}
namespace kf::gpu::layer_norm_linear {
#ifdef KF_WITH_CUDA
Rungs<kf::layer_norm_linear::Args> rungs();
#else
inline Rungs<kf::layer_norm_linear::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::layer_norm_linear
