// bias_gelu_backward: grad_x = grad * gelu'(x + bias); grad_bias[c] = sum over the rows of grad_x, before it is
// rounded.
#pragma once

#include <kf/rung.h>

namespace kf::bias_gelu_backward {

struct Args {
  const void* grad;
  const void* x;
  const void* bias;
  void* grad_x;
  void* grad_bias;
  int64_t rows;
  int64_t width;
  bool tanh;
  DType dtype;
  void* scratch = nullptr;  // partial sums of blocks of rows
};

// What `auto` takes on a GPU, read off results/h200.json.
inline const char* automatic(const Args&) { return "v2_fused"; }

}  // namespace kf::bias_gelu_backward

#define KF_OP bias_gelu_backward
#define KF_RUNGS(RUNG)                                                   \
  RUNG(v1_separate, always, scratch_bytes, "grad_x before it is summed") \
  RUNG(v2_fused, always, scratch_bytes)
#include <kf/rung_list.h>
