// scale: y = factor * x, any number of elements.
#pragma once

#include <kf/rung.h>

namespace kf::scale {

struct Args {
  const void* x;
  void* y;
  int64_t n;
  double factor;
  DType dtype;
};

}  // namespace kf::scale

// The build compiles kernels and table twice, with KF_BACKEND as gpu and as emulated. Host files see only the tables.
#ifdef KF_BACKEND
namespace kf::KF_BACKEND::scale {
using kf::scale::Args;
void v1_chunk(const Args& args, void* stream);
void v2_naive(const Args& args, void* stream);
void v3_grid_stride(const Args& args, void* stream);
void v4_vector(const Args& args, void* stream);
void v5_in_flight(const Args& args, void* stream);
void v6_streaming(const Args& args, void* stream);
}  // namespace kf::KF_BACKEND::scale
#endif

namespace kf::emulated::scale {
Rungs<kf::scale::Args> rungs();
}
namespace kf::gpu::scale {
#ifdef KF_WITH_CUDA
Rungs<kf::scale::Args> rungs();
#else
inline Rungs<kf::scale::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::scale
