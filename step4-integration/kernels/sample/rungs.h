// sample: the next token of each row of logits, and the raw model's log-probability of it.
#pragma once

#include <kf/rung.h>

namespace kf::sample {

struct Args {
  const void* logits;  // [batch, width], rows `stride` elements apart
  int64_t* rng_state;  // [batch, 2]: seed and offset of each row, the offset raised by 1; null: greedy
  uint8_t* seen;       // [batch, width], rows `seen_stride` apart: tokens that the penalty holds for; or null
  int64_t* token;      // [batch]
  float* log_prob;     // [batch]
  int64_t batch;
  int64_t width;  // the vocabulary
  int64_t stride;
  int64_t seen_stride;
  double temperature;  // 0: greedy
  int64_t top_k;       // 0: all
  double top_p;
  double min_p;
  double repetition_penalty;
  DType dtype;
};

// A probability relative to the likeliest token's, as an integer of so many bits (row.h). Sums of integers are the same
// in any order, so the same token comes out of any number of threads, on a CPU and on a GPU.
constexpr int kWeightBits = 35;
constexpr int64_t kMostWidth = int64_t{1} << 24;  // the sum of so many weights has 60 bits at most

// What `auto` takes on a GPU, read off results/h200.json.
inline const char* automatic(const Args&) { return "v3_cluster"; }

}  // namespace kf::sample

#define KF_OP sample
#define KF_RUNGS(RUNG)                      \
  RUNG(v1_naive, always, no_scratch)        \
  RUNG(v2_radix, can_implement, no_scratch) \
  RUNG(v3_cluster, can_implement, no_scratch)
#include <kf/rung_list.h>
