// softmax: y[r, c] = exp(x[r, c]) / Σ_j exp(x[r, j]), x of shape [rows, width], contiguous.
//
// Every rung subtracts the row's maximum first: exp(100) is already too much for float32, and the quotient is the same.
// As in PyTorch, a row of nothing but −inf gives NaN: it has no maximum that could be subtracted.
#pragma once

#include <kf/rung.h>

namespace kf::softmax {

struct Args {
  const void* x;
  void* y;
  int64_t rows;
  int64_t width;
  DType dtype;
};

}  // namespace kf::softmax

// The build compiles kernels and table twice, with KF_BACKEND as gpu and as emulated. Host files see only the tables.
#ifdef KF_BACKEND
namespace kf::KF_BACKEND::softmax {
using kf::softmax::Args;
void v1_naive(const Args& args, void* stream);
void v2_block(const Args& args, void* stream);
void v3_online(const Args& args, void* stream);
void v4_registers(const Args& args, void* stream);

std::string v4_registers_supports(const Args& args);
}  // namespace kf::KF_BACKEND::softmax
#endif

namespace kf::emulated::softmax {
Rungs<kf::softmax::Args> rungs();
}
namespace kf::gpu::softmax {
#ifdef KF_WITH_CUDA
Rungs<kf::softmax::Args> rungs();
#else
inline Rungs<kf::softmax::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::softmax
