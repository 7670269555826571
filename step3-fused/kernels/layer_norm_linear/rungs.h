// layer_norm_linear: y = layer_norm(x) · weight + bias, [rows, width], LayerNorm over the depth. All are contiguous.
#pragma once

#include <kf/rung.h>

namespace kf::layer_norm_linear {

struct Args {
  const void* x;       // [rows, depth]
  const void* weight;  // [depth, width], or, transposed, [width, depth]
  const void* bias;    // [width], or null

  const void* norm_weight;  // [depth]
  const void* norm_bias;    // [depth]
  void* y;
  void* mean;  // of each row, float (double for float64): for the backward pass
  void* rstd;
  double eps;

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

}  // namespace kf::layer_norm_linear

// v1_separate: pieces
// v2_mma, v3_hopper: gelu_linear's v3_hopper has the prologue
#define KF_OP layer_norm_linear
#define KF_RUNGS(RUNG) RUNG(pieces, can_implement, scratch_bytes, "the normalised rows")
#include <kf/rung_list.h>
