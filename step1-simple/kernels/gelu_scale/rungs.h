// gelu_scale: y = factor * gelu(x), any number of elements.
#pragma once

#include <kf/rung.h>

namespace kf::gelu_scale {

struct Args {
  const void* x;
  void* y;
  int64_t n;
  double factor;
  bool tanh;  // GPT-2's approximation; otherwise the exact GELU by erf
  DType dtype;
};

}  // namespace kf::gelu_scale

// The build compiles kernels and table twice, with KF_BACKEND as gpu and as emulated. Host files see only the tables.
#ifdef KF_BACKEND
namespace kf::KF_BACKEND::gelu_scale {
using kf::gelu_scale::Args;
void v1_unfused(const Args& args, void* stream);
void v2_naive(const Args& args, void* stream);
void v3_vector(const Args& args, void* stream);
}  // namespace kf::KF_BACKEND::gelu_scale
#endif

namespace kf::emulated::gelu_scale {
Rungs<kf::gelu_scale::Args> rungs();
}
namespace kf::gpu::gelu_scale {
#ifdef KF_WITH_CUDA
Rungs<kf::gelu_scale::Args> rungs();
#else
inline Rungs<kf::gelu_scale::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::gelu_scale
