// layer_norm_backward: with x̂ = (x − mean)·rstd and g = grad · weight, for each row
//   grad_x = rstd · (g − average of g − x̂ · average of g·x̂) [+ grad_sum]
// and over all rows grad_weight = Σ grad·x̂ and grad_bias = Σ grad. All matrices of shape [rows, width], contiguous.
#pragma once

#include <kf/rung.h>

namespace kf::layer_norm_backward {

struct Args {
  const void* grad;
  const void* x;
  const void* weight;
  const void* mean;  // of each row, float (double for float64), as layer_norm keeps them
  const void* rstd;
  const void* grad_sum;  // null: none
  void* grad_x;
  void* grad_weight;
  void* grad_bias;
  int64_t rows;
  int64_t width;
  DType dtype;
  void* scratch = nullptr;  // see each rung
};

// What `auto` takes on a GPU, read off results/.
inline const char* automatic(const Args&) { return "v4_bulk"; }

}  // namespace kf::layer_norm_backward

#define KF_OP layer_norm_backward
#define KF_RUNGS(RUNG)                              \
  RUNG(v1_naive, can_implement, scratch_bytes)      \
  RUNG(v2_two_stage, can_implement, scratch_bytes)  \
  RUNG(v3_persistent, can_implement, scratch_bytes) \
  RUNG(v4_bulk, can_implement, scratch_bytes)
#include <kf/rung_list.h>
