// The attention that this stage's fused ops begin with, as plain data: no CUDA, no torch.
#pragma once

#include <cstdint>

namespace kf {

// q, k or v: element (b, h, s, d) lies at data + b·batch_stride + h·head_stride + s·row_stride + d, in elements.
// So GPT-2's packed [B, S, 3·H·D] needs no copy.
struct Heads {
  const void* data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;
};

// out[b, i, h·D + d] = Σ_j softmax_j(scale · q[b, h, i] · k[b, h, j]) v[b, h, j, d]: the heads side by side, as a model
// needs them next. Causal: query i sees the keys j ≤ i + k_length − q_length. A query that sees no key gets 0.
struct Attention {
  Heads q;
  Heads k;
  Heads v;
  int64_t batch;
  int64_t heads;
  int64_t q_length;
  int64_t k_length;
  int64_t head_dim;
  double scale;
  bool causal;
};

}  // namespace kf
