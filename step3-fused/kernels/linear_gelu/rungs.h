// linear_gelu: preactivation = x · weight + bias, y = gelu(preactivation), both [rows, width]. All are contiguous.
#pragma once

#include <kf/rung.h>
#include <linear/rungs.h>

namespace kf::linear_gelu {

struct Args : kf::linear::Args {
  void* preactivation;  // for the backward pass, or null
  bool tanh;            // GELU as GPT-2 approximates it, else exact
};

// What `auto` takes, read off results/h200.json: linear_gelu's at 16384 rows, mlp's at 1024. Few rows that the library
// refuses are fastest apart.
inline const char* automatic(const Args& a) {
  if (a.rows <= 64 && (!a.tanh || size_of(a.dtype) != 2 || a.width % 8 != 0)) return "v1_separate";
  if (few_rows_fit(a)) return "v5_dependent";
  return a.preactivation == nullptr || a.rows * a.width < 1 << 24 ? "v4_cublaslt" : "v3_hopper";
}

}  // namespace kf::linear_gelu

#define KF_OP linear_gelu
#define KF_RUNGS(RUNG)                                                            \
  RUNG(v1_separate, can_implement, scratch_bytes, "the product")                  \
  RUNG(v2_mma, can_implement, no_scratch, "the product")                          \
  RUNG(v3_hopper, can_implement, no_scratch, "the product")                       \
  RUNG(v4_cublaslt, can_implement, scratch_bytes, "sums of parts, at some sizes") \
  RUNG(v5_dependent, can_implement, no_scratch, "the product")
#include <kf/rung_list.h>
