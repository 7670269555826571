// gelu_scale: y = factor * gelu(x), any number of elements.
#pragma once

#include <kf/rung.h>

namespace kf::gelu_scale {

struct Args {
  const void* x;
  void* y;
  int64_t n;
  double factor;
  bool tanh;  // GPT-2's approximation; otherwise the exact GELU by erf
  DType dtype;
};

// What `auto` takes on a GPU, read off results/h200.json.
inline const char* automatic(const Args&) { return "v3_vector"; }

}  // namespace kf::gelu_scale

#define KF_OP gelu_scale
#define KF_RUNGS(RUNG)                            \
  RUNG(v1_unfused, always, no_scratch, "gelu(x)") \
  RUNG(v2_naive, always, no_scratch)              \
  RUNG(v3_vector, always, no_scratch)
#include <kf/rung_list.h>
