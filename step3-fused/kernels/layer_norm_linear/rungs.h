// layer_norm_linear: y = layer_norm(x) · weight + bias, [rows, width], LayerNorm over the depth. All are contiguous.
#pragma once

#include <kf/rung.h>
#include <linear/rungs.h>

namespace kf::layer_norm_linear {

struct Args : kf::linear::Args {
  const void* norm_weight;  // [depth]
  const void* norm_bias;    // [depth]
  void* mean;               // of each row, float (double for float64): for the backward pass
  void* rstd;
  double eps;
};

// What `auto` takes on a GPU, read off results/h200.json.
inline const char* automatic(const Args&) { return "pieces"; }

}  // namespace kf::layer_norm_linear

// v1_separate: pieces
// v2_mma, v3_hopper: gelu_linear's v3_hopper has the prologue
#define KF_OP layer_norm_linear
#define KF_RUNGS(RUNG) RUNG(pieces, can_implement, scratch_bytes, "the normalised rows")
#include <kf/rung_list.h>
