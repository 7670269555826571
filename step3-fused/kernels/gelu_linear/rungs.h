// gelu_linear: y = gelu(x) · weight + bias, [rows, width]. All are contiguous.
#pragma once

#include <kf/rung.h>

namespace kf::gelu_linear {

struct Args {
  const void* x;       // [rows, depth]
  const void* weight;  // [depth, width], or, transposed, [width, depth]
  const void* bias;    // [width], or null

  void* y;
  bool tanh;  // GELU as GPT-2 approximates it, else exact

  int64_t rows;
  int64_t depth;
  int64_t width;
  bool weight_transposed;
  bool tf32;  // float32 may be rounded to TF32 before it is multiplied
  DType dtype;
  void* scratch = nullptr;
};

}  // namespace kf::gelu_linear

// v2_mma: a prologue between ldmatrix and mma.sync, computed width/64 times; v3's is computed width/256 times

// The build compiles kernels and table twice, with KF_BACKEND as gpu and as emulated. Host files see only the tables.
#ifdef KF_BACKEND
namespace kf::KF_BACKEND::gelu_linear {
using kf::gelu_linear::Args;
void v1_separate(const Args& args, void* stream);
std::string v1_separate_can_implement(const Args& args);
int64_t v1_separate_scratch_bytes(const Args& args);
void v3_hopper(const Args& args, void* stream);
std::string v3_hopper_can_implement(const Args& args);
}  // namespace kf::KF_BACKEND::gelu_linear
#endif

namespace kf::emulated::gelu_linear {
Rungs<kf::gelu_linear::Args> rungs();
}
namespace kf::gpu::gelu_linear {
#ifdef KF_WITH_CUDA
Rungs<kf::gelu_linear::Args> rungs();
#else
inline Rungs<kf::gelu_linear::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::gelu_linear
