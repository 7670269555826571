// bias_dropout_residual: y[r, c] = residual[r, c] + keep ? (x[r, c] + bias[c]) * 65536 / (65536 - threshold) : 0.
#pragma once

#include <kf/rung.h>

namespace kf::bias_dropout_residual {

struct Args {
  const void* x;
  const void* bias;
  const void* residual;
  void* y;
  int64_t rows;
  int64_t width;
  const int64_t* rng_state;  // {seed, offset} in the GPU's memory; null: the next two members hold them
  uint64_t seed;
  uint64_t offset;
  uint32_t threshold;  // an element is kept where its 16-bit random number is at least this
  DType dtype;
};

}  // namespace kf::bias_dropout_residual

// The build compiles kernels and table twice, with KF_BACKEND as gpu and as emulated. Host files see only the tables.
#ifdef KF_BACKEND
namespace kf::KF_BACKEND::bias_dropout_residual {
using kf::bias_dropout_residual::Args;
void v1_unfused(const Args& args, void* stream);
void v2_naive(const Args& args, void* stream);
void v3_vector(const Args& args, void* stream);
void v4_any_width(const Args& args, void* stream);
}  // namespace kf::KF_BACKEND::bias_dropout_residual
#endif

namespace kf::emulated::bias_dropout_residual {
Rungs<kf::bias_dropout_residual::Args> rungs();
}
namespace kf::gpu::bias_dropout_residual {
#ifdef KF_WITH_CUDA
Rungs<kf::bias_dropout_residual::Args> rungs();
#else
inline Rungs<kf::bias_dropout_residual::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::bias_dropout_residual
