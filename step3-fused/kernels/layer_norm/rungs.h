// layer_norm: y[r, c] = (x[r, c] − mean[r]) / sqrt(variance[r] + eps) · weight[c] + bias[c], x of shape [rows, width],
// contiguous. Mean and biased variance are over the row.
#pragma once

#include <kf/rung.h>

namespace kf::layer_norm {

struct Args {
  const void* x;
  const void* weight;
  const void* bias;
  void* y;
  int64_t rows;
  int64_t width;
  double eps;
  DType dtype;
};

}  // namespace kf::layer_norm

// The build compiles kernels and table twice, with KF_BACKEND as gpu and as emulated. Host files see only the tables.
#ifdef KF_BACKEND
namespace kf::KF_BACKEND::layer_norm {
using kf::layer_norm::Args;
void v1_naive(const Args& args, void* stream);
std::string v1_naive_supports(const Args& args);
void v2_block(const Args& args, void* stream);
std::string v2_block_supports(const Args& args);
}  // namespace kf::KF_BACKEND::layer_norm
#endif

namespace kf::emulated::layer_norm {
Rungs<kf::layer_norm::Args> rungs();
}
namespace kf::gpu::layer_norm {
#ifdef KF_WITH_CUDA
Rungs<kf::layer_norm::Args> rungs();
#else
inline Rungs<kf::layer_norm::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::layer_norm
