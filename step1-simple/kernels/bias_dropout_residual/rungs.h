// bias_dropout_residual: y[r, c] = residual[r, c] + keep ? (x[r, c] + bias[c]) * 65536 / (65536 - threshold) : 0.
#pragma once

#include <kf/rung.h>

namespace kf::bias_dropout_residual {

struct Args {
  const void* x;
  const void* bias;
  const void* residual;
  void* y;
  int64_t rows;
  int64_t width;
  const int64_t* rng_state;  // {seed, offset} in the GPU's memory; null: the next two members hold them
  uint64_t seed;
  uint64_t offset;
  uint32_t threshold;  // an element is kept where its 16-bit random number is at least this
  DType dtype;
};

// What `auto` takes on a GPU, read off results/h200.json.
inline const char* automatic(const Args&) { return "v4_any_width"; }

}  // namespace kf::bias_dropout_residual

#define KF_OP bias_dropout_residual
#define KF_RUNGS(RUNG)                                                            \
  RUNG(v1_unfused, always, no_scratch, "x + bias, and what dropout leaves of it") \
  RUNG(v2_naive, always, no_scratch)                                              \
  RUNG(v3_vector, always, no_scratch)                                             \
  RUNG(v4_any_width, can_implement, no_scratch)
#include <kf/rung_list.h>
