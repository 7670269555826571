// layer_norm_backward: with x̂ = (x − mean)·rstd and g = grad · weight, for each row
//   grad_x = rstd · (g − average of g − x̂ · average of g·x̂) [+ grad_sum]
// and over all rows grad_weight = Σ grad·x̂ and grad_bias = Σ grad. All matrices of shape [rows, width], contiguous.
#pragma once

#include <kf/rung.h>

namespace kf::layer_norm_backward {

struct Args {
  const void* grad;
  const void* x;
  const void* weight;
  const void* mean;  // of each row, float (double for float64), as layer_norm keeps them
  const void* rstd;
  const void* grad_sum;  // null: none
  void* grad_x;
  void* grad_weight;
  void* grad_bias;
  int64_t rows;
  int64_t width;
  DType dtype;
  void* scratch = nullptr;  // see each rung
};

}  // namespace kf::layer_norm_backward

// The build compiles kernels and table twice, with KF_BACKEND as gpu and as emulated. Host files see only the tables.
#ifdef KF_BACKEND
namespace kf::KF_BACKEND::layer_norm_backward {
using kf::layer_norm_backward::Args;
void v1_naive(const Args& args, void* stream);
std::string v1_naive_can_implement(const Args& args);
int64_t v1_naive_scratch_bytes(const Args& args);
void v2_two_stage(const Args& args, void* stream);
std::string v2_two_stage_can_implement(const Args& args);
int64_t v2_two_stage_scratch_bytes(const Args& args);
void v3_persistent(const Args& args, void* stream);
std::string v3_persistent_can_implement(const Args& args);
int64_t v3_persistent_scratch_bytes(const Args& args);
void v4_bulk(const Args& args, void* stream);
std::string v4_bulk_can_implement(const Args& args);
int64_t v4_bulk_scratch_bytes(const Args& args);
}  // namespace kf::KF_BACKEND::layer_norm_backward
#endif

namespace kf::emulated::layer_norm_backward {
Rungs<kf::layer_norm_backward::Args> rungs();
}
namespace kf::gpu::layer_norm_backward {
#ifdef KF_WITH_CUDA
Rungs<kf::layer_norm_backward::Args> rungs();
#else
inline Rungs<kf::layer_norm_backward::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::layer_norm_backward
