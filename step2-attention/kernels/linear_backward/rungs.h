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

// What `auto` takes on a GPU, read off results/h200.json.
inline const char* automatic(const Args&) { return "pieces"; }

}  // namespace kf::linear_backward

#define KF_OP linear_backward
#define KF_RUNGS(RUNG)                          \
  RUNG(v1_vector, can_implement, scratch_bytes) \
  RUNG(v2_mma, can_implement, scratch_bytes)    \
  RUNG(v3_hopper, can_implement, scratch_bytes) \
  RUNG(pieces, can_implement, scratch_bytes, "sums of parts, at some sizes")
#include <kf/rung_list.h>
