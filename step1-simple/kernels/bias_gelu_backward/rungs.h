// bias_gelu_backward: grad_x = grad * gelu'(x + bias); grad_bias[c] = sum over the rows of grad_x, before it is
// rounded.
#pragma once

#include <kf/rung.h>

namespace kf::bias_gelu_backward {

struct Args {
  const void* grad;
  const void* x;
  const void* bias;
  void* grad_x;
  void* grad_bias;
  int64_t rows;
  int64_t width;
  bool tanh;
  DType dtype;
  void* scratch = nullptr;  // partial sums of blocks of rows
};

}  // namespace kf::bias_gelu_backward

// The build compiles kernels and table twice, with KF_BACKEND as gpu and as emulated. Host files see only the tables.
#ifdef KF_BACKEND
namespace kf::KF_BACKEND::bias_gelu_backward {
using kf::bias_gelu_backward::Args;
void v1_separate(const Args& args, void* stream);
void v2_fused(const Args& args, void* stream);
}  // namespace kf::KF_BACKEND::bias_gelu_backward
#endif

namespace kf::emulated::bias_gelu_backward {
Rungs<kf::bias_gelu_backward::Args> rungs();
}
namespace kf::gpu::bias_gelu_backward {
#ifdef KF_WITH_CUDA
Rungs<kf::bias_gelu_backward::Args> rungs();
#else
inline Rungs<kf::bias_gelu_backward::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::bias_gelu_backward
