// linear_bias_dropout_residual: y = residual + dropout(x · weight + bias), [rows, width]. All are contiguous. The mask
// is that of step 1's bias_dropout_residual for the same random numbers.
#pragma once

#include <kf/rung.h>
#include <linear/rungs.h>

namespace kf::linear_bias_dropout_residual {

struct Args : kf::linear::Args {
  const void* residual;      // [rows, width]
  const int64_t* rng_state;  // {seed, offset} in the GPU's memory; null: the next two members hold them
  uint64_t seed;
  uint64_t offset;
  uint32_t threshold;  // an element is kept where its 16-bit random number is at least this
};

// What `auto` takes, read off results/h200.json; few rows are measured as the end of an MLP, without dropout.
inline const char* automatic(const Args& a) {
  if (a.threshold == 0 && a.depth > a.width && few_rows_fit(a)) return "v6_dependent";
  if (a.threshold == 0) return a.rows >= 8192 ? "v5_in_place" : "v4_cublaslt";
  return a.rows <= 64 ? "v1_separate" : "v3_hopper";
}

}  // namespace kf::linear_bias_dropout_residual

// v2_mma: linear_gelu's v2_mma is this with another epilogue
#define KF_OP linear_bias_dropout_residual
#define KF_RUNGS(RUNG)                                                            \
  RUNG(v1_separate, can_implement, scratch_bytes, "the product")                  \
  RUNG(v3_hopper, can_implement, no_scratch, "the product")                       \
  RUNG(v4_cublaslt, can_implement, scratch_bytes, "sums of parts, at some sizes") \
  RUNG(v5_in_place, can_implement, no_scratch, "the product")                     \
  RUNG(v6_dependent, can_implement, no_scratch, "the product")
#include <kf/rung_list.h>
