// residual_layer_norm: sum = residual + dropout(x + x_bias); y = layer_norm(sum). All of shape [rows, width],
// contiguous; both are outputs, since a transformer goes on adding to the sum. mean and rstd as layer_norm's. The mask
// is that of step 1's bias_dropout_residual for the same random numbers. Without x_bias and dropout, sum = residual +
// x.
#pragma once

#include <kf/rung.h>

#include "../layer_norm/rungs.h"

namespace kf::residual_layer_norm {

struct Args {
  const void* x;
  const void* residual;
  const void* weight;
  const void* bias;
  void* y;
  void* sum;
  int64_t rows;
  int64_t width;
  double eps;
  DType dtype;
  void* mean = nullptr;  // null: not wanted
  void* rstd = nullptr;

  const void* x_bias = nullptr;        // [width], or null
  uint32_t threshold = 0;              // of x an element is kept where its 16-bit random number is at least this
  const int64_t* rng_state = nullptr;  // {seed, offset} in the GPU's memory; null: the next two members hold them
  uint64_t seed = 0;
  uint64_t offset = 0;
};

// What `auto` takes, read off results/h200.json; the widest rows are not in it.
inline const char* automatic(const Args& a) {
  return kf::layer_norm::held_in_registers(a.width, a.dtype) ? "v3_registers" : "v4_cluster";
}

}  // namespace kf::residual_layer_norm

#define KF_OP residual_layer_norm
#define KF_RUNGS(RUNG)                                    \
  RUNG(v1_separate, can_implement, no_scratch, "the sum") \
  RUNG(v2_fused, can_implement, no_scratch)               \
  RUNG(v3_registers, can_implement, no_scratch)           \
  RUNG(v4_cluster, can_implement, no_scratch)
#include <kf/rung_list.h>
