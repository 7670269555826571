// bias_gelu: y[r, c] = gelu(x[r, c] + bias[c]), x of shape [rows, width], contiguous.
#pragma once

#include <kf/rung.h>

namespace kf::bias_gelu {

struct Args {
  const void* x;
  const void* bias;
  void* y;
  int64_t rows;
  int64_t width;
  bool tanh;  // GPT-2's approximation; otherwise the exact GELU by erf
  DType dtype;
};

// What `auto` takes on a GPU, read off results/h200.json.
inline const char* automatic(const Args&) { return "v5_any_width"; }

}  // namespace kf::bias_gelu

#define KF_OP bias_gelu
#define KF_RUNGS(RUNG)                             \
  RUNG(v1_unfused, always, no_scratch, "x + bias") \
  RUNG(v2_naive, always, no_scratch)               \
  RUNG(v3_vector, always, no_scratch)              \
  RUNG(v4_exp, always, no_scratch)                 \
  RUNG(v5_any_width, can_implement, no_scratch)
#include <kf/rung_list.h>
