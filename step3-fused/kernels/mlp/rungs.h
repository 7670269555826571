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

// What `auto` takes on a GPU, read off results/h200.json.
inline const char* automatic(const Args& a) { return a.rows <= 64 ? "v7_inner" : "pieces"; }

}  // namespace kf::mlp

// v1_separate, v2_mma, v3_hopper: linear_gelu's and linear_bias_dropout_residual's, one after the other
// v4_best: pieces
#define KF_OP mlp
#define KF_RUNGS(RUNG)                                                   \
  RUNG(v5_rows, can_implement, scratch_bytes, "what lies between")       \
  RUNG(v6_one_launch, can_implement, scratch_bytes, "what lies between") \
  RUNG(v7_inner, can_implement, scratch_bytes, "what lies between")      \
  RUNG(pieces, can_implement, scratch_bytes, "what lies between")
#include <kf/rung_list.h>
