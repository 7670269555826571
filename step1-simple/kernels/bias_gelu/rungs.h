// bias_gelu: y[r, c] = gelu(x[r, c] + bias[c]), x of shape [rows, width], contiguous.
#pragma once

#include <kf/rung.h>

namespace kf::bias_gelu {

struct Args {
  const void* x;
  const void* bias;
  void* y;
  int64_t rows;
  int64_t width;
  bool tanh;  // GPT-2's approximation; otherwise the exact GELU by erf
  DType dtype;
};

}  // namespace kf::bias_gelu

// The build compiles kernels and table twice, with KF_BACKEND as gpu and as emulated. Host files see only the tables.
#ifdef KF_BACKEND
namespace kf::KF_BACKEND::bias_gelu {
using kf::bias_gelu::Args;
void v1_unfused(const Args& args, void* stream);
void v2_naive(const Args& args, void* stream);
void v3_vector(const Args& args, void* stream);
void v4_exp(const Args& args, void* stream);
void v5_any_width(const Args& args, void* stream);
}  // namespace kf::KF_BACKEND::bias_gelu
#endif

namespace kf::emulated::bias_gelu {
Rungs<kf::bias_gelu::Args> rungs();
}
namespace kf::gpu::bias_gelu {
#ifdef KF_WITH_CUDA
Rungs<kf::bias_gelu::Args> rungs();
#else
inline Rungs<kf::bias_gelu::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::bias_gelu
