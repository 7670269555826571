// gelu: y = gelu(x), any number of elements.
#pragma once

#include <kf/rung.h>

namespace kf::gelu {

struct Args {
  const void* x;
  void* y;
  int64_t n;
  bool tanh;  // GPT-2's approximation; otherwise the exact GELU by erf
  DType dtype;
};

// What `auto` takes on a GPU, read off results/h200.json.
inline const char* automatic(const Args&) { return "v3_exp"; }

}  // namespace kf::gelu

#define KF_OP gelu
#define KF_RUNGS(RUNG)                \
  RUNG(v1_naive, always, no_scratch)  \
  RUNG(v2_vector, always, no_scratch) \
  RUNG(v3_exp, always, no_scratch)
#include <kf/rung_list.h>
