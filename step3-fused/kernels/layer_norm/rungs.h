// layer_norm: y[r, c] = (x[r, c] − mean[r]) / sqrt(variance[r] + eps) · weight[c] + bias[c], x of shape [rows, width],
// contiguous. Mean and biased variance are over the row; mean[r] and rstd[r] = 1 / sqrt(variance[r] + eps) are kept for
// the backward pass, as float (double for float64).
#pragma once

#include <kf/rung.h>

namespace kf::layer_norm {

struct Args {
  const void* x;
  const void* weight;
  const void* bias;
  void* y;
  int64_t rows;
  int64_t width;
  double eps;
  DType dtype;
  void* mean = nullptr;  // null: not wanted
  void* rstd = nullptr;
};

// Whether v3_registers holds rows of that width; residual_layer_norm's too.
inline bool held_in_registers(int64_t width, DType dtype) { return width <= (dtype == DType::kFloat64 ? 8192 : 16384); }

// What `auto` takes, read off results/h200.json: a row in registers wherever it fits, in those of a cluster where it is
// wider. But where no vector of 16 bytes divides the width a value at a time is slower from registers than from cache.
inline const char* automatic(const Args& a) {
  if (a.width * size_of(a.dtype) % 16 != 0) return "v1_naive";
  return held_in_registers(a.width, a.dtype) ? "v3_registers" : "v4_cluster";
}

}  // namespace kf::layer_norm

#define KF_OP layer_norm
#define KF_RUNGS(RUNG)                          \
  RUNG(v1_naive, can_implement, no_scratch)     \
  RUNG(v2_block, can_implement, no_scratch)     \
  RUNG(v3_registers, can_implement, no_scratch) \
  RUNG(v4_cluster, can_implement, no_scratch)
#include <kf/rung_list.h>
