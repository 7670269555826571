// layer_norm: y[r, c] = (x[r, c] − mean[r]) / sqrt(variance[r] + eps) · weight[c] + bias[c], x of shape [rows, width],
// contiguous. Mean and biased variance are over the row; mean[r] and rstd[r] = 1 / sqrt(variance[r] + eps) are kept for
// the backward pass, as float (double for float64).
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
  void* mean = nullptr;  // null: not wanted
  void* rstd = nullptr;
};

// Whether v3_registers holds rows of that width; residual_layer_norm's too.
inline bool held_in_registers(int64_t width, DType dtype) { return width <= (dtype == DType::kFloat64 ? 8192 : 16384); }

// What `auto` takes, read off results/h200.json: a row in registers wherever it fits, in those of a cluster where it is
// wider. But where no vector of 16 bytes divides the width a value at a time is slower from registers than from cache.
inline const char* automatic(const Args& a) {
  if (a.width * size_of(a.dtype) % 16 != 0) return "v1_naive";
  return held_in_registers(a.width, a.dtype) ? "v3_registers" : "v4_cluster";
}

}  // namespace kf::layer_norm

// The build compiles kernels and table twice, with KF_BACKEND as gpu and as emulated. Host files see only the tables.
#ifdef KF_BACKEND
namespace kf::KF_BACKEND::layer_norm {
using kf::layer_norm::Args;
void v1_naive(const Args& args, void* stream);
std::string v1_naive_can_implement(const Args& args);
void v2_block(const Args& args, void* stream);
std::string v2_block_can_implement(const Args& args);
void v3_registers(const Args& args, void* stream);
std::string v3_registers_can_implement(const Args& args);
void v4_cluster(const Args& args, void* stream);
std::string v4_cluster_can_implement(const Args& args);
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
