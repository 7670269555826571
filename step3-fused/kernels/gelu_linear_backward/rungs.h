// gelu_linear_backward: for y = gelu(x) · weight + bias, grad_x = grad · weightᵀ · gelu'(x), grad_weight = gelu(x)ᵀ ·
// grad (weight transposed: gradᵀ · gelu(x)) and grad_bias[c] = the sum of grad over the rows. All are contiguous.
#pragma once

#include <kf/rung.h>
#include <linear_backward/rungs.h>

namespace kf::gelu_linear_backward {

struct Args : kf::linear_backward::Args {
  bool tanh;  // GELU as GPT-2 approximates it, else exact
};

// What `auto` takes on a GPU, read off results/h200.json.
inline const char* automatic(const Args&) { return "v3_hopper"; }

}  // namespace kf::gelu_linear_backward

// v2_mma: linear_gelu's v2_mma is this with another epilogue
#define KF_OP gelu_linear_backward
#define KF_RUNGS(RUNG)                                                          \
  RUNG(v1_separate, can_implement, scratch_bytes, "grad · weightᵀ and gelu(x)") \
  RUNG(v3_hopper, can_implement, scratch_bytes, "grad · weightᵀ and gelu(x)")
#include <kf/rung_list.h>
