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

#define KF_OP linear_gelu
#define KF_RUNGS(RUNG)                                           \
  RUNG(v1_separate, can_implement, scratch_bytes, "the product") \
  RUNG(v2_mma, can_implement, no_scratch, "the product")         \
  RUNG(v3_hopper, can_implement, no_scratch, "the product")      \
  RUNG(v4_cublaslt, can_implement, scratch_bytes, "sums of parts, at some sizes")
#include <kf/rung_list.h>
