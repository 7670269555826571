// attention_decode: attention of a text's last queries over a cache of keys; q [B, H, Sq, D], 1 to 16 queries, the
// cache [B, Hkv, Sk, D].
//
// In batch b the keys key_begin[b] ≤ j < key_end[b] exist, and the last query is that of the last key: query i sees
// keys j < key_end[b] − (Sq − 1 − i). Lengths are read on the device, so that a CUDA graph can be replayed with others.
// Paged: with block_table [B, pages] the cache is a heap of pages, [blocks, Hkv, block_size, D], and key j of batch b
// is key j % block_size of page block_table[b][j / block_size]. A page that does not exist gives NaN. Output,
// log-sum-exp, scale and shared heads are attention's, see ../attention/rungs.h.
#pragma once

#include <step2/attention_decode/args.h>

namespace kf::attention_decode {

constexpr int kMostQueries = 16;

// What `auto` takes on a GPU, read off results/h200.json. For a cache in one piece it is no slower than v5.
inline const char* automatic(const Args&) { return "v6_paged"; }

}  // namespace kf::attention_decode

#define KF_OP attention_decode
#define KF_RUNGS(RUNG)                                           \
  RUNG(v1_head, can_implement, no_scratch)                       \
  RUNG(v2_split, can_implement, scratch_bytes)                   \
  RUNG(v3_mma, can_implement, scratch_bytes, "the weights")      \
  RUNG(v4_pipeline, can_implement, scratch_bytes, "the weights") \
  RUNG(v5_cluster, can_implement, no_scratch, "the weights")     \
  RUNG(v6_paged, can_implement, no_scratch, "the weights")
#include <kf/rung_list.h>
