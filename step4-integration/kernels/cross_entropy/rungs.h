// cross_entropy: loss[r] = lse[r] − logits[r, targets[r]] with lse[r] = ln Σ_j exp(logits[r, j]), and the loss's
// gradient, grad[r, j] = exp(logits[r, j] − lse[r]) − (1 where j is targets[r]).
//
// Every rung subtracts the row's maximum first, as softmax does. A target of `ignore_index` has a loss and a gradient
// of 0; one outside the row makes both NaN. Rows lie at any distance, so that a padded one can begin at 16 bytes.
#pragma once

#include <kf/rung.h>

namespace kf::cross_entropy {

struct Args {
  const void* logits;      // [rows, width], each row `logits_stride` elements after the one before
  const int64_t* targets;  // [rows]
  void* loss;              // [rows], float32; float64 where the logits are
  void* lse;               // as loss; or null: not wanted
  void* grad;              // as logits, at `grad_stride`; may be the logits themselves; or null: not wanted
  int64_t rows;
  int64_t width;  // the vocabulary
  int64_t logits_stride;
  int64_t grad_stride;
  int64_t ignore_index;
  DType dtype;
};

// What `auto` takes on a GPU, read off results/h200.json; rows that do not fit there go to the last rung that can.
inline const char* automatic(const Args& a) { return a.width <= 1024 ? "v2_online" : "v4_async"; }

}  // namespace kf::cross_entropy

#define KF_OP cross_entropy
#define KF_RUNGS(RUNG)                       \
  RUNG(v1_naive, can_implement, no_scratch)  \
  RUNG(v2_online, can_implement, no_scratch) \
  RUNG(v3_shared, can_implement, no_scratch) \
  RUNG(v4_async, can_implement, no_scratch)
#include <kf/rung_list.h>
