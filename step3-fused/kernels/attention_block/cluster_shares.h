// How attention_block's v5 divides a problem: rows among clusters, heads and columns among the blocks of one.
#pragma once

#include <kf/launch.h>
#include <step3/step2_attention.h>

#include <algorithm>

#include "cluster_attend.h"
#include "cluster_project.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_block {

constexpr int kMostWidth = 4 * kGroup * kMostShares;  // so many rounds of the fewest warps

struct Shares {
  int warps;          // of a block
  int blocks;         // of a cluster
  int heads, groups;  // of a block; a group has 64 columns
  // Groups are projected in rounds, one a warp; where they are fewer than warps, 2, 4 or 8 warps share a group, and
  // each has a part of the depth: so many steps, of 16 or what a head has left.
  int rounds, log_parts, steps_of_part;

  __host__ __device__ int parts() const { return 1 << log_parts; }
  // From a row of sums to the next, in floats.
  __host__ __device__ int sum_stride() const { return (rounds == 1 ? groups : warps) * kGroup + 4; }
};

// Shared memory begins with this; attention's rows follow, what the rows' ends add, and the warps' memory, in whose
// place a round's sums will be.
struct alignas(128) Header {
  uint64_t rows_arrived, shares_arrived;
  RowShare share[kMostShares][kRows];
};

// Of attention's output, all heads.
__host__ __device__ inline int rows_bytes(int64_t heads) { return static_cast<int>(heads) * kRows * kRowStride * 2; }

// Of what the rows' ends add.
__host__ __device__ inline int fetched_bytes(const Shares& s) {
  return s.rounds == 1 ? (kRows + 3) * s.groups * kGroup * 2 : 0;
}

inline int64_t shared_bytes(const Shares& s, int64_t heads) {
  const int64_t sums = s.parts() * kRows * s.sum_stride() * int64_t{sizeof(float)};
  return int64_t{sizeof(Header)} + rows_bytes(heads) + fetched_bytes(s) +
         std::max(s.warps * int64_t{sizeof(WarpMemory)}, sums);
}

// Most blocks of a cluster: more than 8 only on GPUs made for data centres; before 9.0 there are no clusters.
inline int64_t most_blocks() {
  const int capability = compute_capability();
  return capability < 90 ? 1 : capability < 120 ? kMostShares : 8;
}

// With so many heads a block.
inline Shares shares_with(const Attention& t, int warps, int64_t heads) {
  const int64_t width = t.heads * t.head_dim, blocks = ceil_div(t.heads, heads);
  Shares s{};
  s.warps = warps;
  s.blocks = static_cast<int>(blocks);
  s.heads = static_cast<int>(heads);
  s.groups = static_cast<int>(ceil_div(ceil_div(width, kGroup), blocks));
  s.rounds = (s.groups + warps - 1) / warps;
  s.log_parts = log_warps_of_each(s.groups, warps);
  s.steps_of_part = static_cast<int>(ceil_div(t.heads * ceil_div(t.head_dim, 16), s.parts()));
  return s;
}

// What `pieces` of work, each for 1, 2, 4 or 8 warps, take: all of their bytes, as if the warps without work had some.
inline int64_t with_idle_warps(int64_t bytes, int64_t pieces, int warps) {
  const int at_once = static_cast<int>(std::min<int64_t>(pieces, warps));
  return bytes * warps / (at_once << log_warps_of_each(at_once, warps));
}

// Of all ways with clusters of up to `most` blocks the one that takes the shortest: what a block reads, and 900 KB more
// for its begin, its end and the waits between (on an H200 they take 11 µs, and 80 KB a microsecond arrive).
// Multiprocessors come in groups of up to 18, and a cluster lies in one; two blocks of a multiprocessor wait at the
// same time, where memory suffices. No blocks where 16 rows do not fit into shared memory.
inline Shares shares_of(const Args& a, int64_t most) {
  constexpr int64_t kOverhead = 900 * 1024;
  const Attention& t = a.attention;
  const int64_t width = t.heads * t.head_dim, limit = shared_memory_limit(), element = size_of(a.dtype);
  const bool half_seen = t.causal && t.q_length == t.k_length;
  const int64_t keys = half_seen ? t.k_length / 2 : t.k_length, clusters = t.batch * ceil_div(t.q_length, kRows);
  Shares best{};
  int64_t least = INT64_MAX;
  for (int64_t blocks = std::min(most, t.heads); blocks > 0; --blocks) {
    const int64_t heads = ceil_div(t.heads, blocks);
    if (ceil_div(t.heads, heads) != blocks) continue;  // the last blocks would have none
    Shares shares = shares_with(t, 8, heads);
    if (shared_bytes(shares, t.heads) > limit) shares = shares_with(t, 4, heads);
    if (shared_bytes(shares, t.heads) > limit || (blocks > 1 && shares.rounds > 1)) continue;
    const int64_t at_once = std::max(multiprocessors() / 18, int64_t{1}) * (18 / blocks);
    const int64_t waves = ceil_div(clusters, at_once), waits = 2 * shared_bytes(shares, t.heads) < limit ? 2 : 1;
    const int64_t bytes = with_idle_warps(heads * keys * 2 * t.head_dim * element, heads, shares.warps) +
                          with_idle_warps(shares.groups * kGroup * width * element, shares.groups, shares.warps);
    const int64_t time = ceil_div(waves, waits) * kOverhead + waves * bytes;
    if (time <= least) best = shares, least = time;
  }
  return best;
}

inline attention_decode::Args attention_of(const Args& a) {
  attention_decode::Args args{};
  static_cast<kf::attention::Args&>(args) = attention_args(a.attention, a.dtype, nullptr, a.attention.lse);
  return args;
}

// For `supports`: why there is no way, or "".
inline std::string refused_shares(const Args& a) {
  const Attention& t = a.attention;
  const std::string refused = attention::on_tensor_cores(attention_of(a), kRows);
  if (!refused.empty()) return refused;
  if (t.head_dim > kHeadColumns) return "takes head_dim ≤ 64, got " + std::to_string(t.head_dim);
  if (t.batch > 65535) return "takes at most 65535 batches, got " + std::to_string(t.batch);
  if (t.q_length > 65535 * kRows) return "takes at most 1048560 queries, got " + std::to_string(t.q_length);
  if (!attention::is_above_0(t.scale)) return "takes a scale above 0, got " + std::to_string(t.scale);
  if (t.threshold != 0) return "drops none of attention's weights: it takes an `attention_p` of 0";
  if (!aligned_16(a.residual, a.proj_weight, a.proj_bias, a.weight, a.bias, a.sum, a.y, a.attended)) {
    return "takes residual, parameters and outputs that begin at multiples of 16 bytes";
  }
  if (t.heads * t.head_dim > kMostWidth) {
    return "takes heads·head_dim ≤ 4096, got " + std::to_string(t.heads * t.head_dim);
  }
  return too_much_shared_memory(shared_bytes(shares_with(t, 4, ceil_div(t.heads, most_blocks())), t.heads),
                                "16 rows of " + std::to_string(t.heads) + " heads");
}

}  // namespace kf::KF_BACKEND::attention_block
