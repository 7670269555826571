// linear_gelu_backward: with grad_h = grad · gelu'(preactivation), grad_x = grad_h · weightᵀ, grad_weight = xᵀ · grad_h
// (weight transposed: grad_hᵀ · x) and grad_bias[c] = the sum of grad_h over the rows. All are contiguous.
#pragma once

#include <kf/rung.h>
#include <linear_backward/rungs.h>

namespace kf::linear_gelu_backward {

struct Args : kf::linear_backward::Args {
  const void* preactivation;  // [rows, width]
  bool tanh;                  // GELU as GPT-2 approximates it, else exact
};

// What `auto` takes on a GPU, read off results/h200.json.
inline const char* automatic(const Args&) { return "v2_fused"; }

}  // namespace kf::linear_gelu_backward

// v1_separate: step 1's bias_gelu_backward has both
#define KF_OP linear_gelu_backward
#define KF_RUNGS(RUNG) RUNG(v2_fused, can_implement, scratch_bytes, "grad · gelu'(preactivation)")
#include <kf/rung_list.h>
