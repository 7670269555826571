// bias_dropout_residual_backward: grad_x = keep ? grad * 65536 / (65536 - threshold) : 0; grad_bias[c] = its sum over
// rows.
#pragma once

#include <kf/rung.h>

namespace kf::bias_dropout_residual_backward {

struct Args {
  const void* grad;
  void* grad_x;
  void* grad_bias;
  int64_t rows;
  int64_t width;
  const int64_t* rng_state;  // {seed, offset} in the GPU's memory; null: the next two members hold them
  uint64_t seed;
  uint64_t offset;
  uint32_t threshold;  // an element is kept where its 16-bit random number is at least this
  DType dtype;
  void* scratch = nullptr;  // partial sums of blocks of rows
};

}  // namespace kf::bias_dropout_residual_backward

// The build compiles kernels and table twice, with KF_BACKEND as gpu and as emulated. Host files see only the tables.
#ifdef KF_BACKEND
namespace kf::KF_BACKEND::bias_dropout_residual_backward {
using kf::bias_dropout_residual_backward::Args;
void v1_separate(const Args& args, void* stream);
void v2_fused(const Args& args, void* stream);
}  // namespace kf::KF_BACKEND::bias_dropout_residual_backward
#endif

namespace kf::emulated::bias_dropout_residual_backward {
Rungs<kf::bias_dropout_residual_backward::Args> rungs();
}
namespace kf::gpu::bias_dropout_residual_backward {
#ifdef KF_WITH_CUDA
Rungs<kf::bias_dropout_residual_backward::Args> rungs();
#else
inline Rungs<kf::bias_dropout_residual_backward::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::bias_dropout_residual_backward
