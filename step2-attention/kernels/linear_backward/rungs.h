// linear_backward: for y = x · weight + bias, grad_x = grad · weightᵀ, grad_weight = xᵀ · grad (weight transposed:
// gradᵀ · x) and grad_bias[c] = the sum of grad over the rows. All are contiguous.
#pragma once

#include <kf/rung.h>

namespace kf::linear_backward {

struct Args {
  const void* grad;    // [rows, width]
  const void* x;       // [rows, depth]
  const void* weight;  // [depth, width], or, transposed, [width, depth]
  void* grad_x;
  void* grad_weight;
  void* grad_bias;

  int64_t rows;
  int64_t depth;
  int64_t width;
  bool weight_transposed;
  bool tf32;  // float32 may be rounded to TF32 before it is multiplied
  DType dtype;
  void* scratch = nullptr;
};

}  // namespace kf::linear_backward

// The build compiles kernels and table twice, with KF_BACKEND as gpu and as emulated. Host files see only the tables.
#ifdef KF_BACKEND
namespace kf::KF_BACKEND::linear_backward {
using kf::linear_backward::Args;
void v1_vector(const Args& args, void* stream);
std::string v1_vector_can_implement(const Args& args);
int64_t v1_vector_scratch_bytes(const Args& args);
void v2_mma(const Args& args, void* stream);
std::string v2_mma_can_implement(const Args& args);
int64_t v2_mma_scratch_bytes(const Args& args);
void v3_hopper(const Args& args, void* stream);
std::string v3_hopper_can_implement(const Args& args);
int64_t v3_hopper_scratch_bytes(const Args& args);
void v4_best(const Args& args, void* stream);
std::string v4_best_can_implement(const Args& args);
int64_t v4_best_scratch_bytes(const Args& args);
}  // namespace kf::KF_BACKEND::linear_backward
#endif

namespace kf::emulated::linear_backward {
Rungs<kf::linear_backward::Args> rungs();
}
namespace kf::gpu::linear_backward {
#ifdef KF_WITH_CUDA
Rungs<kf::linear_backward::Args> rungs();
#else
inline Rungs<kf::linear_backward::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::linear_backward
