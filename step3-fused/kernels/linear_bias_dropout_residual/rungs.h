// linear_bias_dropout_residual: y = residual + dropout(x · weight + bias), [rows, width]. All are contiguous. The mask
// is that of step 1's bias_dropout_residual for the same random numbers.
#pragma once

#include <kf/rung.h>

namespace kf::linear_bias_dropout_residual {

struct Args {
  const void* x;       // [rows, depth]
  const void* weight;  // [depth, width], or, transposed, [width, depth]
  const void* bias;    // [width], or null

  const void* residual;  // [rows, width]
  void* y;
  const int64_t* rng_state;  // {seed, offset} in the GPU's memory; null: the next two members hold them
  uint64_t seed;
  uint64_t offset;
  uint32_t threshold;  // an element is kept where its 16-bit random number is at least this

  int64_t rows;
  int64_t depth;
  int64_t width;
  bool weight_transposed;
  bool tf32;  // float32 may be rounded to TF32 before it is multiplied
  DType dtype;
  void* scratch = nullptr;
};

// What `auto` takes, read off results/h200.json; few rows are measured as mlp's, without dropout.
inline const char* automatic(const Args& a) {
  if (a.threshold == 0) return a.rows >= 8192 ? "v5_in_place" : "v4_cublaslt";
  return a.rows <= 64 ? "v1_separate" : "v3_hopper";
}

}  // namespace kf::linear_bias_dropout_residual

// The build compiles kernels and table twice, with KF_BACKEND as gpu and as emulated. Host files see only the tables.
#ifdef KF_BACKEND
namespace kf::KF_BACKEND::linear_bias_dropout_residual {
using kf::linear_bias_dropout_residual::Args;
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
void v5_in_place(const Args& args, void* stream);
std::string v5_in_place_can_implement(const Args& args);
}  // namespace kf::KF_BACKEND::linear_bias_dropout_residual
#endif

namespace kf::emulated::linear_bias_dropout_residual {
Rungs<kf::linear_bias_dropout_residual::Args> rungs();
}
namespace kf::gpu::linear_bias_dropout_residual {
#ifdef KF_WITH_CUDA
Rungs<kf::linear_bias_dropout_residual::Args> rungs();
#else
inline Rungs<kf::linear_bias_dropout_residual::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::linear_bias_dropout_residual
