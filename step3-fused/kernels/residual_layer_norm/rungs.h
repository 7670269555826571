// residual_layer_norm: sum = x + residual; y = layer_norm(sum). All of shape [rows, width], contiguous; both are
// outputs, since a transformer goes on adding to the sum.
#pragma once

#include <kf/rung.h>

namespace kf::residual_layer_norm {

struct Args {
  const void* x;
  const void* residual;
  const void* weight;
  const void* bias;
  void* y;
  void* sum;
  int64_t rows;
  int64_t width;
  double eps;
  DType dtype;
};

}  // namespace kf::residual_layer_norm

// The build compiles kernels and table twice, with KF_BACKEND as gpu and as emulated. Host files see only the tables.
#ifdef KF_BACKEND
namespace kf::KF_BACKEND::residual_layer_norm {
using kf::residual_layer_norm::Args;
void v1_separate(const Args& args, void* stream);
void v2_fused(const Args& args, void* stream);
std::string v2_fused_supports(const Args& args);
}  // namespace kf::KF_BACKEND::residual_layer_norm
#endif

namespace kf::emulated::residual_layer_norm {
Rungs<kf::residual_layer_norm::Args> rungs();
}
namespace kf::gpu::residual_layer_norm {
#ifdef KF_WITH_CUDA
Rungs<kf::residual_layer_norm::Args> rungs();
#else
inline Rungs<kf::residual_layer_norm::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::residual_layer_norm
