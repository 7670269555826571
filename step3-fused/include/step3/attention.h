// The attention that this step's fused ops begin with, as plain data: no CUDA, no torch.
#pragma once

#include <cstdint>

namespace kf {

// q, k or v: element (b, h, s, d) lies at data + b·batch_stride + h·head_stride + s·seq_stride + d, in elements.
// So GPT-2's packed [B, S, 3·H·D] needs no copy.
struct TensorRef {
  const void* data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t seq_stride;
};

// out[b, i, h·D + d] = Σ_j softmax_j(scale · q[b, h, i] · k[b, h, j]) v[b, h, j, d]: the heads side by side, as a model
// needs them next. Causal: query i sees the keys j ≤ i + k_length − q_length. key_begin, key_end: in batch b only the
// keys key_begin[b] ≤ j < key_end[b] exist, the others are padding. A query that sees no key gets 0. lse, the
// log-sum-exp, is the logarithm of what the weights were divided by: −inf where a query sees no key. cu_seqlens: the
// queries cu_seqlens[d] ≤ i < cu_seqlens[d + 1] see the keys of these numbers alone, as if document d were the row.
struct Attention {
  TensorRef q;
  TensorRef k;
  TensorRef v;
  int64_t batch;
  int64_t heads;
  int64_t q_length;
  int64_t k_length;
  int64_t head_dim;
  double scale;
  bool causal;
  const int32_t* key_begin = nullptr;  // [batch], or null: 0
  const int32_t* key_end = nullptr;    // [batch], or null: k_length
  void* lse = nullptr;                 // [batch, heads, q_length]: float32, or float64 for float64; null: not wanted
  // Dropout of the weights: one is kept where its random number of 16 bits is at least `threshold`; 0: all are kept.
  uint32_t threshold = 0;
  const int64_t* rng_state = nullptr;  // in the GPU's memory, {seed, offset}; or null: as follows
  uint64_t seed = 0, offset = 0;
  // Of a packed row, batch 1, where its documents begin, and where the last ends: [documents + 1]; null: one a batch.
  const int32_t* cu_seqlens = nullptr;
  int64_t documents = 0;
};

}  // namespace kf
