// softmax_backward: grad_x[r, c] = scale·y[r, c]·(grad[r, c] − Σ_j y[r, j]·grad[r, j]), all of shape [rows, width],
// contiguous; y is what softmax returned.
//
// Under the causal mask they are a batch of squares, `q_length` rows each: row i of a square sees the columns
// j ≤ i + width − q_length. The others are 0, and what grad and y hold there is not used.
#pragma once

#include <kf/rung.h>

namespace kf::softmax_backward {

struct Args {
  const void* grad;
  const void* y;
  void* grad_x;
  int64_t rows;
  int64_t width;
  int64_t q_length;  // rows of a square of scores; asked under `causal` only
  double scale;
  bool causal;
  DType dtype;
};

// How many rows a square has that the causal mask is laid over; 0 where there is none.
inline int64_t mask_of(const Args& a) { return a.causal ? a.q_length : 0; }

// What `auto` takes on a GPU, read off results/h200.json; as softmax's.
inline const char* automatic(const Args& a) {
  return a.width * size_of(a.dtype) <= 32768 ? "v3_registers" : "v4_cluster";
}

}  // namespace kf::softmax_backward

#define KF_OP softmax_backward
#define KF_RUNGS(RUNG)                          \
  RUNG(v1_naive, always, no_scratch)            \
  RUNG(v2_block, can_implement, no_scratch)     \
  RUNG(v3_registers, can_implement, no_scratch) \
  RUNG(v4_cluster, can_implement, no_scratch)
#include <kf/rung_list.h>
