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

// What `auto` takes on a GPU, read off results/h200.json.
inline const char* automatic(const Args&) { return "v1_separate"; }

}  // namespace kf::gelu_linear

// v2_mma: a prologue between ldmatrix and mma.sync, computed width/64 times; v3's is computed width/256 times
#define KF_OP gelu_linear
#define KF_RUNGS(RUNG)                                       \
  RUNG(v1_separate, can_implement, scratch_bytes, "gelu(x)") \
  RUNG(v3_hopper, can_implement, no_scratch, "gelu(x)")
#include <kf/rung_list.h>
