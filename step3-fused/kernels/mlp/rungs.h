// mlp: y = gelu(x · weight_1 + bias_1) · weight_2 + bias_2 + residual, [rows, width]. All are contiguous.
#pragma once

#include <kf/rung.h>

namespace kf::mlp {

struct Args {
  const void* x;         // [rows, width]
  const void* weight_1;  // [width, inner], or, transposed, [inner, width]
  const void* bias_1;    // [inner]
  const void* weight_2;  // [inner, width], or, transposed, [width, inner]
  const void* bias_2;    // [width]
  const void* residual;  // [rows, width], or null
  void* y;
  void* preactivation;  // x · weight_1 + bias_1, [rows, inner], for the backward pass; or null
  int64_t rows;
  int64_t width;
  int64_t inner;
  bool weight_transposed;
  bool tanh;  // GELU as GPT-2 approximates it, else exact
  bool tf32;  // float32 may be rounded to TF32 before it is multiplied
  DType dtype;
  void* scratch = nullptr;
};

}  // namespace kf::mlp

// The build compiles kernels and table twice, with KF_BACKEND as gpu and as emulated. Host files see only the tables.
#ifdef KF_BACKEND
namespace kf::KF_BACKEND::mlp {
using kf::mlp::Args;
void v1_separate(const Args& args, void* stream);
std::string v1_separate_can_implement(const Args& args);
int64_t v1_separate_scratch_bytes(const Args& args);
void v2_mma(const Args& args, void* stream);
std::string v2_mma_can_implement(const Args& args);
int64_t v2_mma_scratch_bytes(const Args& args);
void v3_hopper(const Args& args, void* stream);
std::string v3_hopper_can_implement(const Args& args);
int64_t v3_hopper_scratch_bytes(const Args& args);
void v4_best(const Args& args, void* stream);
std::string v4_best_can_implement(const Args& args);
int64_t v4_best_scratch_bytes(const Args& args);
void v5_rows(const Args& args, void* stream);
std::string v5_rows_can_implement(const Args& args);
int64_t v5_rows_scratch_bytes(const Args& args);
void v6_one_launch(const Args& args, void* stream);
std::string v6_one_launch_can_implement(const Args& args);
int64_t v6_one_launch_scratch_bytes(const Args& args);
void v7_inner(const Args& args, void* stream);
std::string v7_inner_can_implement(const Args& args);
int64_t v7_inner_scratch_bytes(const Args& args);
}  // namespace kf::KF_BACKEND::mlp
#endif

namespace kf::emulated::mlp {
Rungs<kf::mlp::Args> rungs();
}
namespace kf::gpu::mlp {
#ifdef KF_WITH_CUDA
Rungs<kf::mlp::Args> rungs();
#else
inline Rungs<kf::mlp::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::mlp
