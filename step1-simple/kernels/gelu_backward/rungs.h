// gelu_backward: grad_x = grad * factor * gelu'(x), any number of elements.
#pragma once

#include <kf/rung.h>

namespace kf::gelu_backward {

struct Args {
  const void* grad;
  const void* x;
  void* grad_x;
  int64_t n;
  double factor;  // gelu_scale's; 1 for gelu
  bool tanh;
  DType dtype;
};

// What `auto` takes on a GPU, read off results/h200.json.
inline const char* automatic(const Args&) { return "v2_vector"; }

}  // namespace kf::gelu_backward

#define KF_OP gelu_backward
#define KF_RUNGS(RUNG)               \
  RUNG(v1_naive, always, no_scratch) \
  RUNG(v2_vector, always, no_scratch)
#include <kf/rung_list.h>
