// embedding: y[b, s, c] = token[ids[b, s], c] + position_weight[max(0, position + positions[b] + s), c], everything
// contiguous. An id or a position that has no row makes a row of NaN.
#pragma once

#include <kf/rung.h>

namespace kf::embedding {

struct Args {
  const void* ids;  // [batch, length], int64 or int32
  const void* token;
  const void* position_weight;  // [position_rows, width]
  void* y;
  int64_t batch;
  int64_t length;
  int64_t width;
  int64_t vocab;
  int64_t position_rows;
  int64_t position;          // of the first id: how many tokens came before it
  const int32_t* positions;  // [batch], added to it; null for zeros
  bool ids_64;
  DType dtype;
};

// What `auto` takes on a GPU, read off results/h200.json.
inline const char* automatic(const Args& a) { return a.batch < 8 ? "v2_vector" : "v3_batched"; }

}  // namespace kf::embedding

#define KF_OP embedding
#define KF_RUNGS(RUNG)                \
  RUNG(v1_naive, always, no_scratch)  \
  RUNG(v2_vector, always, no_scratch) \
  RUNG(v3_batched, can_implement, no_scratch)
#include <kf/rung_list.h>
