// scale: y = factor * x, any number of elements.
#pragma once

#include <kf/rung.h>

namespace kf::scale {

struct Args {
  const void* x;
  void* y;
  int64_t n;
  double factor;
  DType dtype;
};

// What `auto` takes on a GPU, read off results/h200.json.
inline const char* automatic(const Args&) { return "v4_vector"; }

}  // namespace kf::scale

#define KF_OP scale
#define KF_RUNGS(RUNG)                     \
  RUNG(v1_chunk, always, no_scratch)       \
  RUNG(v2_naive, always, no_scratch)       \
  RUNG(v3_grid_stride, always, no_scratch) \
  RUNG(v4_vector, always, no_scratch)      \
  RUNG(v5_in_flight, always, no_scratch)   \
  RUNG(v6_streaming, always, no_scratch)
#include <kf/rung_list.h>
