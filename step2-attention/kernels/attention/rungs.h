// attention: out = softmax(scale · q kᵀ) v for each batch and head; q [B, H, Sq, D], k and v [B, Hkv, Sk, D].
//
// causal: query i sees keys j ≤ i + Sk − Sq, so that the last query sees all keys. That is what a decode step needs,
// whose one query is the last position. key_begin, key_end: in batch b only the keys key_begin[b] ≤ j < key_end[b]
// exist, the others are padding. A query that sees no key gives 0. lse, the log-sum-exp, is the logarithm of what the
// weights were divided by, ln Σ exp(scale · q·k) over the keys that a query sees: −inf where it sees none.
// Fewer heads of k and v than of q: H/Hkv neighbouring heads of q share one.
#pragma once

#include <kf/rung.h>

namespace kf::attention {

// Distances in elements. The last dimension is contiguous, so a view into GPT-2's packed q, k, v needs no copy.
struct Strides {
  int64_t batch;
  int64_t head;
  int64_t seq;
};

struct Args {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  void* lse;                 // [B, H, Sq], contiguous: float32, or float64 for float64
  const int32_t* key_begin;  // [B], or null: 0
  const int32_t* key_end;    // [B], or null: Sk
  Strides q_stride;
  Strides k_stride;
  Strides v_stride;
  Strides out_stride;
  int64_t batch;
  int64_t heads;     // of q
  int64_t kv_heads;  // of k and v: divides `heads`
  int64_t q_length;
  int64_t k_length;
  int64_t head_dim;
  double scale = 1;
  bool causal;
  DType dtype;
  void* scratch = nullptr;  // for rungs that ask for it
  // Dropout of the weights: one is kept where its random number of 16 bits is at least `threshold`; 0: all are kept.
  uint32_t threshold = 0;
  const int64_t* rng_state = nullptr;  // in the GPU's memory, {seed, offset}; or null: as follows
  uint64_t seed = 0;
  uint64_t offset = 0;
};

// What `auto` takes, measured on an H200 with its 132 multiprocessors. A tile of 64 queries that splits its keys is
// done soonest, where each has a multiprocessor. In a long causal square they see half of the keys on average, so two
// rounds, the heaviest first, take about as long as the heaviest alone. Then v7's tiles, if they need no second round,
// then persistent blocks.
inline const char* automatic(const Args& a) {
  const auto tiles = [&](int64_t of) { return a.batch * a.heads * ((a.q_length + of - 1) / of); };
  const bool half_seen = a.causal && a.q_length == a.k_length && a.q_length > 512;
  if (tiles(64) <= (half_seen ? 2 : 1) * 132) return "v9_split";
  const bool one_round = a.q_length > 256 && tiles(a.head_dim <= 64 ? 192 : 128) <= 132;
  return one_round ? "v7_warpgroups" : "v8_persistent";
}

}  // namespace kf::attention

#define KF_OP attention
#define KF_RUNGS(RUNG)                                          \
  RUNG(v1_naive, always, scratch_bytes)                         \
  RUNG(v2_tiled, can_implement, no_scratch)                     \
  RUNG(v3_mma, can_implement, no_scratch, "the weights")        \
  RUNG(v4_pipeline, can_implement, no_scratch, "the weights")   \
  RUNG(v5_registers, can_implement, no_scratch, "the weights")  \
  RUNG(v6_wgmma, can_implement, no_scratch, "the weights")      \
  RUNG(v7_warpgroups, can_implement, no_scratch, "the weights") \
  RUNG(v8_persistent, can_implement, no_scratch, "the weights") \
  RUNG(v9_split, can_implement, no_scratch, "the weights")
#include <kf/rung_list.h>
