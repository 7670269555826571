// GPT-2's weights once more, as v4_clusters reads them: for each warp a stream of steps in the order of use, and
// constants.
//
// A block writes a warp's part of a product, 16 bytes a thread. LayerNorm's two numbers of a row are sums along the
// depth, a warp each.
#pragma once

#include "cluster_shares.h"
#include "pack.h"

namespace kf::KF_BACKEND::decode_step {

// What tells these weights from v3_persistent's, and from others of as many bytes.
template <class T>
__device__ __forceinline__ uint4 label(const Shares& s) {
  const uint32_t layers_and_steps = static_cast<uint32_t>(s.layers) << 16 | static_cast<uint32_t>(s.steps) << 8;
  return {~static_cast<uint32_t>(s.width), static_cast<uint32_t>(s.inner), static_cast<uint32_t>(s.vocab),
          layers_and_steps | static_cast<uint32_t>(s.clusters) << 1 | std::is_same_v<T, __half>};
}

// A product's weights, bias, and the LayerNorm before it, each or null. `logits`: weights are [vocab, depth].
template <class T>
struct Operands {
  const T *weight, *bias, *gain, *shift;
  int depth, columns;
  bool logits;

  __device__ __forceinline__ int64_t at(int column, int place) const {
    return logits ? static_cast<int64_t>(column) * depth + place : static_cast<int64_t>(place) * columns + column;
  }
  __device__ __forceinline__ T value(const Shares::Spot& spot) const {
    return spot.column < 0 || spot.place < 0 ? from_compute<T>(0) : weight[at(spot.column, spot.place)];
  }
};

// spot(step, row, depth): of the model's weights.
template <class T, class Spot>
__device__ __forceinline__ void pack_steps(int steps, const Operands<T>& m, unsigned char* to, Spot spot) {
  constexpr int kVectors = kStepBytes / 16;
  for (int v = threadIdx.x; v < steps * kVectors; v += kPackThreads) {
    Vector<T, 8> out;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const StepSpot in_step = spot_in_step(v % kVectors * 8 + e);
      out.element[e] = m.value(spot(v / kVectors, in_step.row, in_step.depth));
    }
    store_vector(reinterpret_cast<T*>(to) + v * 8, out);
  }
}

// LayerNorm's two numbers of a row of the weights, its bias in the second; of none, zeros. By a warp.
template <class T>
__device__ __forceinline__ float2 numbers_of_row(const Operands<T>& m, int column) {
  if (column < 0) return {0, 0};
  float2 sums = sums_of_row(m.depth, m.gain, m.shift, [&](int k) { return m.weight[m.at(column, k)]; });
  if (m.bias != nullptr) sums.y += to_compute(m.bias[column]);
  return sums;
}

template <class T>
__global__ void __launch_bounds__(kPackThreads)
    pack_shares_kernel(const Shares s, const Layer w, const T* next_gain, int layer, unsigned char* packed) {
  const WarpPlace p = Shares::place(blockIdx.x);
  const Kind kind = static_cast<Kind>(blockIdx.y);
  const auto element = [](const void* pointer) { return static_cast<const T*>(pointer); };
  const T* const none = nullptr;
  const int width = s.width, inner = s.inner;
  const Operands<T> of_kind[kKinds] = {
      {element(w.attention_weight), element(w.attention_bias), element(w.ln_1_weight), element(w.ln_1_bias), width,
       3 * width, false},
      {element(w.projection_weight), element(w.projection_bias), none, none, width, width, false},
      {element(w.fc_weight), element(w.fc_bias), element(w.ln_2_weight), element(w.ln_2_bias), width, inner, false},
      {element(w.second_weight), element(w.second_bias), none, none, inner, width, false}};
  const Operands<T>& m = of_kind[static_cast<int>(kind)];
  int64_t before = static_cast<int64_t>(layer) * s.layer_steps(p);
  for (int k = 0; k < static_cast<int>(kind); ++k) before += s.product_steps(p, static_cast<Kind>(k));
  pack_steps(s.product_steps(p, kind), m, packed + s.stream_at(p) + before * kStepBytes,
             [&](int step, int row, int depth) { return s.spot(p, kind, step, row, depth); });

  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarpSize;
  unsigned char* const constants = packed + s.constants_of(p, layer);
  if (kind == Kind::kQkv || kind == Kind::kFc) {
    const bool qkv = kind == Kind::kQkv;
    if (warp < kMostTiles * kGranule) {
      const int tile = warp / kGranule, row = Shares::tile(p, kind, tile) * kGranule + warp % kGranule;
      const bool exists = tile < s.tiles(p, kind);
      const int column = !exists ? -1 : (qkv ? s.column_of_qkv_row(p, row) : s.column_of_hidden_row(p, row));
      const float2 sums = numbers_of_row(m, column);
      if (thread % kWarpSize == 0) {
        reinterpret_cast<float2*>(constants)[(qkv ? 0 : kMostTiles * kGranule) + warp] = sums;
      }
    }
    return;
  }
  if (thread >= Shares::kOfColumns) return;
  const int column = s.column_of_x(p, thread / kGranule, thread % kGranule);
  const auto number = [&](const T* of) { return column < 0 ? from_compute<T>(0) : of[column]; };
  const bool projection = kind == Kind::kProjection;
  const auto of_x = [&](unsigned char* of_layer, Shares::OfX which) -> T& {
    return reinterpret_cast<T*>(of_layer + Shares::kRowBytes)[which * Shares::kOfColumns + thread];
  };
  of_x(constants, projection ? Shares::kBias : Shares::kSecondBias) = number(m.bias);
  of_x(constants, projection ? Shares::kGain : Shares::kNextGain) =
      number(projection ? element(w.ln_2_weight) : next_gain);
  if (projection && layer == 0)
    of_x(packed + s.constants_of(p, -1), Shares::kNextGain) = number(element(w.ln_1_weight));
}

template <class T>
__global__ void __launch_bounds__(kPackThreads)
    pack_shared_logits_kernel(const Shares s, const Operands<T> m, unsigned char* packed) {
  const WarpPlace p = Shares::place(blockIdx.x);
  const Range own = s.logit_tiles(p);
  const int tile = static_cast<int>(blockIdx.y);
  if (tile < own.count()) {
    const auto column = [&](int row) {
      const int of_vocab = (own.first + tile) * kGranule + row;
      return of_vocab < s.vocab ? of_vocab : -1;
    };
    const int64_t before = static_cast<int64_t>(s.layers) * s.layer_steps(p) + static_cast<int64_t>(tile) * s.steps;
    pack_steps(s.steps, m, packed + s.stream_at(p) + before * kStepBytes, [&](int step, int row, int depth) {
      const int place = step * kStepDepth + depth;
      return Shares::Spot{column(row), place < s.width ? place : -1};
    });
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    if (warp < kGranule) {
      const float2 sums = numbers_of_row(m, column(warp));
      if (threadIdx.x % kWarpSize == 0) reinterpret_cast<float2*>(packed + s.rows_of(p, tile))[warp] = sums;
    }
  }
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
    reinterpret_cast<uint4*>(packed)[s.label_at] = label<T>(s);
  }
}

template <class T>
void pack_shares(const Args& a, const Shares& s, void* stream) {
  unsigned char* const packed = static_cast<unsigned char*>(a.packed);
  const auto element = [](const void* pointer) { return static_cast<const T*>(pointer); };
  check(cudaMemsetAsync(packed, 0, s.rows_at, as_stream(stream)), "cudaMemsetAsync");  // state, sums, constants
  const unsigned warps = static_cast<unsigned>(s.clusters * kOfCluster);
  for (int layer = 0; layer < s.layers; ++layer) {
    const T* const next = element(layer + 1 < s.layers ? a.weights[layer + 1].ln_1_weight : a.ln_weight);
    pack_shares_kernel<T>
        <<<dim3(warps, kKinds), kPackThreads, 0, as_stream(stream)>>>(s, a.weights[layer], next, layer, packed);
    check_launch();
  }
  const Operands<T> logits{
      element(a.token_weight), nullptr, element(a.ln_weight), element(a.ln_bias), s.width, s.vocab, true};
  pack_shared_logits_kernel<T>
      <<<dim3(warps, s.most_logit_tiles()), kPackThreads, 0, as_stream(stream)>>>(s, logits, packed);
  check_launch();
}

}  // namespace kf::KF_BACKEND::decode_step
