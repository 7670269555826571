// linear_gelu: preactivation = x · weight + bias, y = gelu(preactivation), both [rows, width]. All are contiguous.
#pragma once

#include <kf/rung.h>

namespace kf::linear_gelu {

struct Args {
  const void* x;       // [rows, depth]
  const void* weight;  // [depth, width], or, transposed, [width, depth]
  const void* bias;    // [width], or null

  void* y;
  void* preactivation;  // for the backward pass, or null
  bool tanh;            // GELU as GPT-2 approximates it, else exact

  int64_t rows;
  int64_t depth;
  int64_t width;
  bool weight_transposed;
  bool tf32;  // float32 may be rounded to TF32 before it is multiplied
  DType dtype;
  void* scratch = nullptr;
};

// What `auto` takes, read off results/h200.json: linear_gelu's at 16384 rows, mlp's at 1024. Few rows that the library
// refuses are fastest apart.
inline const char* automatic(const Args& a) {
  if (a.rows <= 64 && (!a.tanh || size_of(a.dtype) != 2 || a.width % 8 != 0)) return "v1_separate";
  return a.preactivation == nullptr || a.rows * a.width < 1 << 24 ? "v4_cublaslt" : "v3_hopper";
}

}  // namespace kf::linear_gelu

// The build compiles kernels and table twice, with KF_BACKEND as gpu and as emulated. Host files see only the tables.
#ifdef KF_BACKEND
namespace kf::KF_BACKEND::linear_gelu {
using kf::linear_gelu::Args;
void v1_separate(const Args& args, void* stream);
std::string v1_separate_can_implement(const Args& args);
int64_t v1_separate_scratch_bytes(const Args& args);
void v2_mma(const Args& args, void* stream);
std::string v2_mma_can_implement(const Args& args);
void v3_hopper(const Args& args, void* stream);
std::string v3_hopper_can_implement(const Args& args);
void v4_cublaslt(const Args& args, void* stream);
std::string v4_cublaslt_can_implement(const Args& args);
int64_t v4_cublaslt_scratch_bytes(const Args& args);
}  // namespace kf::KF_BACKEND::linear_gelu
#endif

namespace kf::emulated::linear_gelu {
Rungs<kf::linear_gelu::Args> rungs();
}
namespace kf::gpu::linear_gelu {
#ifdef KF_WITH_CUDA
Rungs<kf::linear_gelu::Args> rungs();
#else
inline Rungs<kf::linear_gelu::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::linear_gelu
