// linear_bias_dropout_residual_backward: with grad_p = dropout's mask, scaled, times grad, grad_x = grad_p · weightᵀ,
// grad_weight = xᵀ · grad_p (weight transposed: grad_pᵀ · x) and grad_bias[c] = the sum of grad_p over the rows. (That
// of the residual is grad itself.) All are contiguous.
#pragma once

#include <kf/rung.h>
#include <linear_backward/rungs.h>

namespace kf::linear_bias_dropout_residual_backward {

struct Args : kf::linear_backward::Args {
  const int64_t* rng_state;  // {seed, offset} in the GPU's memory; null: the next two members hold them
  uint64_t seed;
  uint64_t offset;
  uint32_t threshold;  // an element is kept where its 16-bit random number is at least this
};

// What `auto` takes on a GPU, read off results/h200.json.
inline const char* automatic(const Args&) { return "v2_fused"; }

}  // namespace kf::linear_bias_dropout_residual_backward

// v1_separate: step 1's bias_dropout_residual_backward has both
#define KF_OP linear_bias_dropout_residual_backward
#define KF_RUNGS(RUNG) RUNG(v2_fused, can_implement, scratch_bytes, "the masked gradient")
#include <kf/rung_list.h>
