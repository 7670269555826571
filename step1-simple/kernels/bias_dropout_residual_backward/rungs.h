// bias_dropout_residual_backward: grad_x = keep ? grad * 65536 / (65536 - threshold) : 0; grad_bias[c] = its sum over
// rows.
#pragma once

#include <kf/rung.h>

namespace kf::bias_dropout_residual_backward {

struct Args {
  const void* grad;
  void* grad_x;
  void* grad_bias;
  int64_t rows;
  int64_t width;
  const int64_t* rng_state;  // {seed, offset} in the GPU's memory; null: the next two members hold them
  uint64_t seed;
  uint64_t offset;
  uint32_t threshold;  // an element is kept where its 16-bit random number is at least this
  DType dtype;
  void* scratch = nullptr;  // partial sums of blocks of rows
};

// What `auto` takes on a GPU, read off results/h200.json.
inline const char* automatic(const Args&) { return "v2_fused"; }

}  // namespace kf::bias_dropout_residual_backward

#define KF_OP bias_dropout_residual_backward
#define KF_RUNGS(RUNG)                                                   \
  RUNG(v1_separate, always, scratch_bytes, "grad_x before it is summed") \
  RUNG(v2_fused, always, scratch_bytes)
#include <kf/rung_list.h>
