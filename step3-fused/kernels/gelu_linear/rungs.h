// gelu_linear: y = gelu(x) · weight + bias, [rows, width]. All are contiguous.
#pragma once

#include <kf/rung.h>
#include <linear/rungs.h>

namespace kf::gelu_linear {

struct Args : kf::linear::Args {
  bool tanh;  // GELU as GPT-2 approximates it, else exact
};

// What `auto` takes on a GPU, read off results/h200.json.
inline const char* automatic(const Args&) { return "v1_separate"; }

}  // namespace kf::gelu_linear

// v2_mma: a prologue between ldmatrix and mma.sync, computed width/64 times; v3's is computed width/256 times
#define KF_OP gelu_linear
#define KF_RUNGS(RUNG)                                       \
  RUNG(v1_separate, can_implement, scratch_bytes, "gelu(x)") \
  RUNG(v3_hopper, can_implement, no_scratch, "gelu(x)")
#include <kf/rung_list.h>
