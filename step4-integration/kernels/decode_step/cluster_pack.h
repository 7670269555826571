// GPT-2's weights once more, as v4_clusters reads them: for each warp a stream of steps in the order of use, and
// constants.
//
// A block writes a warp's part of a product: each of its own warps a step, a lane 16 bytes of a row. LayerNorm's two
// numbers of a row are sums along the depth, added up by whoever writes it.
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

// `logits`: weights are [vocab, depth].
template <class T>
struct Operands : Parameters<T> {
  int depth, columns;
  bool logits;

  __device__ __forceinline__ int64_t at(int column, int place) const {
    return logits ? static_cast<int64_t>(column) * depth + place : static_cast<int64_t>(place) * columns + column;
  }
};

__device__ __forceinline__ float over_lanes_of_row(float sum) {
  sum += __shfl_xor_sync(kFullWarp, sum, 1);
  sum += __shfl_xor_sync(kFullWarp, sum, 2);
  return sum + __shfl_xor_sync(kFullWarp, sum, 16);
}

// Steps of a product, `of_tile` to a tile. spot(step, row): where the row begins in the model's weights. Behind a
// LayerNorm `numbers` gets its two of each row of each tile, the bias in the second.
template <class T, class Spot>
__device__ __forceinline__ void pack_steps(int steps, int of_tile, const Operands<T>& m, unsigned char* to, Spot spot,
                                           float2* numbers) {
  __shared__ float2 of_place[kMostSteps * kStepDepth];  // gain and shift
  __shared__ float2 of_warps[kPackWarps][kMostTiles][kGranule];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpSize, warp = thread / kWarpSize;
  const int row = spot_in_step(lane * 8).row;
  const bool normed = m.gain != nullptr;
  if (normed) {
    for (int place = thread; place < of_tile * kStepDepth; place += kPackThreads) {
      const bool exists = place < m.depth;
      of_place[place] = {exists ? to_compute(m.gain[place]) : 0, exists ? to_compute(m.shift[place]) : 0};
    }
    __syncthreads();
  }
  float2 sums[kMostTiles] = {};
  for (int step = warp; step < steps; step += kPackWarps) {
    const Shares::Spot first = spot(step, row);
    float2 sum = {0, 0};
    Vector<T, 8> out;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int place = first.place + spot_in_step(lane * 8 + e).depth;
      const bool exists = first.column >= 0 && first.place >= 0 && place < m.depth;
      out.element[e] = exists ? m.weight[m.at(first.column, place)] : from_compute<T>(0);
      if (!normed || !exists) continue;
      const float value = to_compute(out.element[e]);
      sum = {sum.x + value * of_place[place].x, sum.y + value * of_place[place].y};
    }
    store_vector(reinterpret_cast<T*>(to) + (step * kWarpSize + lane) * 8, out);
#pragma unroll
    for (int tile = 0; tile < kMostTiles; ++tile) {
      if (step / of_tile == tile) sums[tile] = {sums[tile].x + sum.x, sums[tile].y + sum.y};
    }
  }
  if (!normed) return;
#pragma unroll
  for (int tile = 0; tile < kMostTiles; ++tile) {
    const float2 of_row{over_lanes_of_row(sums[tile].x), over_lanes_of_row(sums[tile].y)};
    if (lane == row * kGranule) of_warps[warp][tile][row] = of_row;
  }
  __syncthreads();
  if (thread >= steps / of_tile * kGranule) return;
  const int tile = thread / kGranule, column = spot(tile * of_tile, thread % kGranule).column;
  float2 all = {0, column >= 0 && m.bias != nullptr ? to_compute(m.bias[column]) : 0};
  for (const auto& of_warp : of_warps) {
    const float2 more = of_warp[tile][thread % kGranule];
    all = {all.x + more.x, all.y + more.y};
  }
  numbers[thread] = all;
}

template <class T>
__global__ void __launch_bounds__(kPackThreads)
    pack_shares_kernel(const Shares s, const Layer w, const T* next_gain, int layer, unsigned char* packed) {
  const WarpPlace p = Shares::place(blockIdx.x);
  const Kind kind = static_cast<Kind>(blockIdx.y);
  const auto element = [](const void* pointer) { return static_cast<const T*>(pointer); };
  const Operands<T> m{parameters_of<T>(kind, w), depth_of(kind, s.width, s.inner), columns_of(kind, s.width, s.inner),
                      false};
  int64_t before = static_cast<int64_t>(layer) * s.layer_steps(p);
  for (int k = 0; k < static_cast<int>(kind); ++k) before += s.product_steps(p, static_cast<Kind>(k));
  unsigned char* const constants = packed + s.constants_of(p, layer);
  pack_steps(
      s.product_steps(p, kind), s.steps, m, packed + s.stream_at(p) + before * kStepBytes,
      [&](int step, int row) { return s.spot(p, kind, step, row, 0); },
      reinterpret_cast<float2*>(constants) + (kind == Kind::kFc ? kMostTiles * kGranule : 0));
  if (kind == Kind::kQkv || kind == Kind::kFc) return;
  const int thread = static_cast<int>(threadIdx.x);
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
    const auto spot = [&](int step, int row) { return Shares::Spot{column(row), step * kStepDepth}; };
    pack_steps(s.steps, s.steps, m, packed + s.stream_at(p) + before * kStepBytes, spot,
               reinterpret_cast<float2*>(packed + s.rows_of(p, tile)));
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
      {element(a.token_weight), nullptr, element(a.ln_weight), element(a.ln_bias)}, s.width, s.vocab, true};
  pack_shared_logits_kernel<T>
      <<<dim3(warps, s.most_logit_tiles()), kPackThreads, 0, as_stream(stream)>>>(s, logits, packed);
  check_launch();
}

}  // namespace kf::KF_BACKEND::decode_step
