// softmax: y[r, c] = exp(scale·x[r, c]) / Σ_j exp(scale·x[r, j]), x of shape [rows, width], contiguous.
//
// Under the causal mask x is a batch of squares of scores, `q_length` rows each: row i of a square sees the columns
// j ≤ i + width − q_length. The others are 0, and what they hold is not used. A row that sees nothing is 0.
//
// Every rung subtracts the row's maximum first: exp(100) is already too much for float32, and the quotient is the same.
// As in PyTorch, a row that sees nothing but −inf gives NaN: it has no maximum that could be subtracted.
#pragma once

#include <kf/rung.h>

namespace kf::softmax {

struct Args {
  const void* x;
  void* y;
  int64_t rows;
  int64_t width;
  int64_t q_length;  // rows of a square of scores; asked under `causal` only
  double scale;
  bool causal;
  DType dtype;
};

// How many rows a square has that the causal mask is laid over; 0 where there is none.
inline int64_t mask_of(const Args& a) { return a.causal ? a.q_length : 0; }

// What `auto` takes on a GPU, read off results/h200.json. Of rows up to 32 KB several fit into a multiprocessor's
// registers; wider ones are shared.
inline const char* automatic(const Args& a) {
  return a.width * size_of(a.dtype) <= 32768 ? "v4_registers" : "v6_cluster_registers";
}

}  // namespace kf::softmax

#define KF_OP softmax
#define KF_RUNGS(RUNG)                          \
  RUNG(v1_naive, always, no_scratch)            \
  RUNG(v2_block, can_implement, no_scratch)     \
  RUNG(v3_online, can_implement, no_scratch)    \
  RUNG(v4_registers, can_implement, no_scratch) \
  RUNG(v5_cluster, can_implement, no_scratch)   \
  RUNG(v6_cluster_registers, can_implement, no_scratch)
#include <kf/rung_list.h>
