// gelu: y = gelu(x), any number of elements.
#pragma once

#include <kf/rung.h>

namespace kf::gelu {

struct Args {
  const void* x;
  void* y;
  int64_t n;
  bool tanh;  // GPT-2's approximation; otherwise the exact GELU by erf
  DType dtype;
};

}  // namespace kf::gelu

// The build compiles kernels and table twice, with KF_BACKEND as gpu and as emulated. Host files see only the tables.
#ifdef KF_BACKEND
namespace kf::KF_BACKEND::gelu {
using kf::gelu::Args;
void v1_naive(const Args& args, void* stream);
void v2_vector(const Args& args, void* stream);
void v3_exp(const Args& args, void* stream);
}  // namespace kf::KF_BACKEND::gelu
#endif

namespace kf::emulated::gelu {
Rungs<kf::gelu::Args> rungs();
}
namespace kf::gpu::gelu {
#ifdef KF_WITH_CUDA
Rungs<kf::gelu::Args> rungs();
#else
inline Rungs<kf::gelu::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::gelu
