// gelu_backward: grad_x = grad * factor * gelu'(x), any number of elements.
#pragma once

#include <kf/rung.h>

namespace kf::gelu_backward {

struct Args {
  const void* grad;
  const void* x;
  void* grad_x;
  int64_t n;
  double factor;  // gelu_scale's; 1 for gelu
  bool tanh;
  DType dtype;
};

}  // namespace kf::gelu_backward

// The build compiles kernels and table twice, with KF_BACKEND as gpu and as emulated. Host files see only the tables.
#ifdef KF_BACKEND
namespace kf::KF_BACKEND::gelu_backward {
using kf::gelu_backward::Args;
void v1_naive(const Args& args, void* stream);
void v2_vector(const Args& args, void* stream);
}  // namespace kf::KF_BACKEND::gelu_backward
#endif

namespace kf::emulated::gelu_backward {
Rungs<kf::gelu_backward::Args> rungs();
}
namespace kf::gpu::gelu_backward {
#ifdef KF_WITH_CUDA
Rungs<kf::gelu_backward::Args> rungs();
#else
inline Rungs<kf::gelu_backward::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::gelu_backward
