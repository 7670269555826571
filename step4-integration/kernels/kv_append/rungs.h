// kv_append: k_cache[b, h, position + positions[b] + s, d] = k[b, h, s, d], and the same for v. Where the cache has no
// such token, nothing is written.
#pragma once

#include <kf/rung.h>

namespace kf::kv_append {

// Distances in elements between neighbours of a [batch, head, token, head_dim] tensor; along head_dim it is 1.
struct Strides {
  int64_t batch;
  int64_t head;
  int64_t seq;
};

struct Args {
  const void* k;  // [batch, heads, length, head_dim], usually a view into GPT-2's packed q, k, v
  const void* v;
  void* k_cache;  // [batch, heads, capacity, head_dim]
  void* v_cache;
  Strides k_strides;
  Strides v_strides;
  Strides k_cache_strides;
  Strides v_cache_strides;
  int64_t batch;
  int64_t heads;
  int64_t length;
  int64_t head_dim;
  int64_t capacity;
  int64_t position;          // the first token to write
  const int32_t* positions;  // [batch], added to it; null for zeros
  DType dtype;
};

// What `auto` takes on a GPU, read off results/h200.json.
inline const char* automatic(const Args&) { return "v2_vector"; }

}  // namespace kf::kv_append

#define KF_OP kv_append
#define KF_RUNGS(RUNG)               \
  RUNG(v1_naive, always, no_scratch) \
  RUNG(v2_vector, always, no_scratch)
#include <kf/rung_list.h>
