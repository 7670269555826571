// What attention and its relatives are about, as plain numbers and pointers; what they mean: kernels/attention/rungs.h.
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
  // Of a packed row, batch 1: where its documents begin in q, and in k and v: [documents + 1] each; or null, both.
  const int32_t* cu_seqlens = nullptr;
  const int32_t* cu_seqlens_k = nullptr;
  int64_t documents = 0;
};

}  // namespace kf::attention
