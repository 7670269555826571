// attention: out = softmax(scale · q kᵀ) v for each batch and head; q [B, H, Sq, D], k and v [B, Hkv, Sk, D].
//
// causal: query i sees keys j ≤ i + Sk − Sq, so that the last query sees all keys. That is what a decode step needs,
// whose one query is the last position. key_begin, key_end: in batch b only the keys key_begin[b] ≤ j < key_end[b]
// exist, the others are padding. A query that sees no key gives 0. lse, the log-sum-exp, is the logarithm of what the
// weights were divided by, ln Σ exp(scale · q·k) over the keys that a query sees: −inf where it sees none.
// Fewer heads of k and v than of q: H/Hkv neighbouring heads of q share one.
// cu_seqlens: of a packed row, batch 1, the queries cu_seqlens[d] ≤ i < cu_seqlens[d + 1] are document d's. They see
// its keys alone, those that cu_seqlens_k names; causal is a mask within it (step2/attention/documents.h).
#pragma once

#include <step2/attention/args.h>

namespace kf::attention {

// What `auto` takes, measured on an H200 with its 132 multiprocessors. A tile of 64 queries that splits its keys is
// done soonest, where each has a multiprocessor. In a long causal square they see half of the keys on average, so two
// rounds, the heaviest first, take about as long as the heaviest alone. Then v7's tiles, if they need no second round,
// then persistent blocks. Of a packed row whose documents are shorter than a tile of these, 256 queries, most would be
// empty: v6's may have several documents.
inline const char* automatic(const Args& a) {
  const auto tiles = [&](int64_t of) { return a.batch * a.heads * ((a.q_length + of - 1) / of); };
  const bool packed = a.documents > 0;  // what its tiles see nobody knows here
  const bool half_seen = !packed && a.causal && a.q_length == a.k_length && a.q_length > 512;
  if (tiles(64) <= (half_seen ? 2 : 1) * 132) return "v9_split";
  if (packed && a.q_length < 256 * a.documents) return "v6_wgmma";
  const bool one_round = !packed && a.q_length > 256 && tiles(a.head_dim <= 64 ? 192 : 128) <= 132;
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
