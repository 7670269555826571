// How the blocks of a cluster share few rows, for attention_block's v5 and attention_residual_layer_norm's v4: how many
// they are, and how they tell each other what they know of a row.
#pragma once

#include <kf/launch.h>
#include <step2/dependent_launch.h>
#include <step2/mbarrier.h>
#include <step3/statistics.h>
#include <step3/step2_attention.h>

#include <algorithm>
#include <optional>
#include <string>

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
__device__ __forceinline__ void tell(int lane, const RowShare& known, RowShare* to, uint64_t* arrived, int blocks) {
  if (blocks == 1) {
    if (lane == 0) *to = known;
  } else if (lane < blocks) {
    const uint32_t barrier = remote_address(arrived, lane);
    store_remote_async(remote_address(&to->mean_and_rest, lane), known.mean_and_rest, barrier);
    store_remote_async(remote_address(&to->squares_and_count, lane), known.squares_and_count, barrier);
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

// How a rung divides heads is a Way: it has `warps` of a block, `blocks` of a cluster and `heads` of a block, and
// shared_bytes(way, t) stands beside it.
//
// Of all ways with clusters of up to `most` blocks the one that takes the shortest: what a block reads, and `overhead`
// bytes more for its begin, its end and the waits between. Two blocks of a multiprocessor wait at the same time, where
// memory suffices. with(warps, heads) makes a way, and reads(way) tells what a block of it reads besides keys and
// values; nothing: it is none. No blocks where 16 rows do not fit into shared memory.
template <class With, class Reads>
auto shortest_way(const Attention& t, DType dtype, int64_t most, int64_t overhead, With with, Reads reads) {
  const int64_t clusters = t.batch * ceil_div(t.q_length, kRows), limit = shared_memory_limit();
  const int64_t of_head = keys_seen(t) * 2 * t.head_dim * size_of(dtype);
  decltype(with(8, t.heads)) best{};
  int64_t least = INT64_MAX;
  for (int64_t blocks = std::min(most, t.heads); blocks > 0; --blocks) {
    const int64_t heads = ceil_div(t.heads, blocks);
    if (ceil_div(t.heads, heads) != blocks) continue;  // the last blocks would have none
    auto way = with(8, heads);
    if (shared_bytes(way, t) > limit) way = with(4, heads);
    const std::optional<int64_t> more = reads(way);
    if (shared_bytes(way, t) > limit || !more) continue;
    const int64_t waves = waves_of(clusters, blocks), waits = 2 * shared_bytes(way, t) < limit ? 2 : 1;
    const int64_t bytes = with_idle_warps(heads * of_head, heads, way.warps) + *more;
    const int64_t time = ceil_div(waves, waits) * overhead + waves * bytes;
    if (time <= least) best = way, least = time;
  }
  return best;
}

// Of the ways that find(most) gives the first for which the current GPU has room: where a part of one is given out, it
// may have none for such a cluster. No blocks where none has.
template <class Kernel, class Find>
auto way_with_room(Kernel kernel, const Attention& t, Find find) {
  auto way = find(most_blocks());
  while (way.blocks > 1 && clusters_at_once(kernel, way.blocks, way.warps * kWarpSize, shared_bytes(way, t)) == 0) {
    way = find(way.blocks - 1);
  }
  return way;
}

// A block for each 16 rows of a batch and each block of a cluster; kernel(arguments…, way).
template <class Way, class... Params, class... Arguments>
void launch_way(void (*kernel)(Params...), const Attention& t, const Way& way, void* stream, Arguments... arguments) {
  const dim3 grid(way.blocks, static_cast<unsigned>(ceil_div(t.q_length, kRows)), static_cast<unsigned>(t.batch));
  const int threads = way.warps * kWarpSize;
  const int64_t bytes = shared_bytes(way, t);
  if (way.blocks > 1) {
    launch_dependent_in_clusters(kernel, way.blocks, grid, threads, bytes, stream, arguments..., way);
  } else {
    allow_shared(kernel, bytes);
    launch_dependent(kernel, grid, threads, bytes, stream, arguments..., way);
  }
}

inline attention_decode::Args attention_of(const Attention& t, DType dtype) {
  attention_decode::Args args{};
  static_cast<kf::attention::Args&>(args) = attention_args(t, dtype, nullptr, t.lse);
  return args;
}

// Why no block can attend to 16 rows at a time, or "".
inline std::string can_implement_few_rows(const Attention& t, DType dtype) {
  const std::string why_not = attention::on_tensor_cores(attention_of(t, dtype), kRows);
  if (!why_not.empty()) return why_not;
  if (t.head_dim > kHeadColumns) return "takes head_dim ≤ 64, got " + std::to_string(t.head_dim);
  if (t.batch > 65535) return "takes at most 65535 batches, got " + std::to_string(t.batch);
  if (t.q_length > 65535 * kRows) return "takes at most 1048560 queries, got " + std::to_string(t.q_length);
  if (!attention::is_above_0(t.scale)) return "takes a scale above 0, got " + std::to_string(t.scale);
  if (t.threshold != 0) return "drops none of attention's weights: it takes an `attention_dropout_p` of 0";
  return "";
}

}  // namespace kf::KF_BACKEND::attention_block
