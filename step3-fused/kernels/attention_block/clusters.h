// How the blocks of a cluster share few rows, for attention_block's v5 and attention_residual_layer_norm's v4: how many
// they are, and how they tell each other what they know of a row.
#pragma once

#include <kf/launch.h>
#include <step2/cluster.h>
#include <step2/mbarrier.h>
#include <step3/statistics.h>
#include <step3/step2_attention.h>

#include <algorithm>

#include "cluster_attend.h"

namespace kf::KF_BACKEND::attention_block {

constexpr int kMostShares = 16;  // of a row: blocks of a cluster, or rounds of a block; one for each lane of a row

// Of the lanes of a row, half a warp.
constexpr int kRowLanes = 16;
__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
  for (int away = kRowLanes / 2; away > 0; away /= 2) x += __shfl_xor_sync(kFullWarp, x, away);
  return x;
}

// Of a row some columns, as a block knows them: to be put together by the formula of Chan, Golub and LeVeque (see
// cluster_row.h).
struct RowShare {
  Pair<float> mean_and_rest;      // rest: the sum of x − mean
  Pair<float> squares_and_count;  // squares: the sum of (x − mean)²
};

// To the same place in the shared memory of all blocks of the cluster, where `arrived` counts the bytes: by the lanes
// of a row, one for each block. No blocks: there is no such row.
__device__ __forceinline__ void tell(int lane, const RowShare& known, RowShare* place, uint64_t* arrived, int blocks) {
  if (blocks == 1) {
    if (lane == 0) *place = known;
  } else if (lane < blocks) {
    const uint32_t barrier = remote_address(arrived, lane);
    store_remote_async(remote_address(&place->mean_and_rest, lane), known.mean_and_rest, barrier);
    store_remote_async(remote_address(&place->squares_and_count, lane), known.squares_and_count, barrier);
  }
}

// By the lanes of a row, from all shares of it; each is `kRows` after the one before.
__device__ __forceinline__ Statistics<float> statistics_of(const RowShare* share, int shares, int width, float eps) {
  const int lane = threadIdx.x % kRowLanes;
  const RowShare s = lane < shares ? share[lane * kRows] : RowShare{};
  const float count = s.squares_and_count.second;
  const float mean = row_sum(s.mean_and_rest.first * count) / static_cast<float>(width);
  const float off = s.mean_and_rest.first - mean;
  const float left = row_sum(s.mean_and_rest.second + off * count);
  const float squares = row_sum(s.squares_and_count.first + off * (2 * s.mean_and_rest.second + off * count));
  return statistics(mean, left, squares, width, eps);
}

// ---- on the host ----

// Most blocks of a cluster: more than 8 only on GPUs made for data centres; before 9.0 there are no clusters.
inline int64_t most_blocks() {
  const int capability = compute_capability();
  return capability < 90 ? 1 : capability < 120 ? kMostShares : 8;
}

// What `pieces` of work, each for 1, 2, 4 or 8 warps, take: all of their bytes, as if the warps without work had some.
inline int64_t with_idle_warps(int64_t bytes, int64_t pieces, int warps) {
  const int at_once = static_cast<int>(std::min<int64_t>(pieces, warps));
  return bytes * warps / (at_once << log_warps_of_each(at_once, warps));
}

// In how many waves a GPU runs so many clusters of `blocks` each: multiprocessors come in groups of up to 18, and a
// cluster lies in one.
inline int64_t waves_of(int64_t clusters, int64_t blocks) {
  return ceil_div(clusters, std::max(multiprocessors() / 18, int64_t{1}) * (18 / blocks));
}

// Of the keys the part that the mean query sees.
inline int64_t keys_seen(const Attention& t) {
  return t.causal && t.q_length == t.k_length ? t.k_length / 2 : t.k_length;
}

inline attention_decode::Args attention_of(const Attention& t, DType dtype) {
  attention_decode::Args args{};
  static_cast<kf::attention::Args&>(args) = attention_args(t, dtype, nullptr, t.lse);
  return args;
}

// Why no block can attend to 16 rows at a time, or "".
inline std::string refused_few_rows(const Attention& t, DType dtype) {
  const std::string refused = attention::on_tensor_cores(attention_of(t, dtype), kRows);
  if (!refused.empty()) return refused;
  if (t.head_dim > kHeadColumns) return "takes head_dim ≤ 64, got " + std::to_string(t.head_dim);
  if (t.batch > 65535) return "takes at most 65535 batches, got " + std::to_string(t.batch);
  if (t.q_length > 65535 * kRows) return "takes at most 1048560 queries, got " + std::to_string(t.q_length);
  if (!attention::is_above_0(t.scale)) return "takes a scale above 0, got " + std::to_string(t.scale);
  if (t.threshold != 0) return "drops none of attention's weights: it takes an `attention_p` of 0";
  return "";
}

}  // namespace kf::KF_BACKEND::attention_block
