// How attention_block's v5 divides a problem: rows among clusters, heads and columns among the blocks of one.
#pragma once

#include <kf/launch.h>

#include <algorithm>

#include "cluster_attend.h"
#include "cluster_project.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_block {

struct Shares {
  int warps;          // of a block
  int blocks;         // of a cluster
  int heads, groups;  // of a block; a group has 64 columns
  // Groups are projected in rounds, one a warp; where they are fewer than warps, 2, 4 or 8 warps share a group, and
  // each has a part of the depth: so many steps of 16.
  int rounds, log_parts, steps_of_part;

  __host__ __device__ int parts() const { return 1 << log_parts; }
  // From a row of sums to the next, in floats.
  __host__ __device__ int sum_stride() const { return (rounds == 1 ? groups : warps) * kGroup + 4; }
};

// Shared memory begins with this; attention's rows follow, what the rows' ends add, and the warps' memory, in whose place
// a round's sums will be.
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
  while ((s.groups << (s.log_parts + 1)) <= warps) ++s.log_parts;
  s.steps_of_part = static_cast<int>(ceil_div(width / 16, s.parts()));
  return s;
}

// Of all ways the one whose busiest multiprocessor reads the fewest bytes of keys, values and weights; to begin and to
// end takes a block as long as to read 200 KB. Multiprocessors come in groups of 16 or more, and a cluster lies in one.
// No blocks where 16 rows do not fit into shared memory.
inline Shares shares_of(const Args& a) {
  constexpr int64_t kOverhead = 200 * 1024;
  const Attention& t = a.attention;
  const int64_t width = t.heads * t.head_dim, limit = shared_memory_limit();
  const int64_t keys_of_head = t.k_length * 2 * t.head_dim * size_of(a.dtype);
  const bool half_seen = t.causal && t.q_length == t.k_length;
  Shares best{};
  int64_t least = INT64_MAX;
  for (int64_t blocks = std::min(most_blocks(), t.heads); blocks > 0; --blocks) {
    const int64_t heads = ceil_div(t.heads, blocks);
    if (ceil_div(t.heads, heads) != blocks) continue;  // the last blocks would have none
    Shares shares = shares_with(t, 8, heads);
    if (shared_bytes(shares, t.heads) > limit) shares = shares_with(t, 4, heads);
    if (shared_bytes(shares, t.heads) > limit || shares.rounds > (blocks > 1 ? 1 : kMostShares)) continue;
    const int64_t begin_and_weights = kOverhead + shares.groups * kGroup * width * size_of(a.dtype);
    const int64_t keys = heads * keys_of_head, at_once = std::max(multiprocessors() / 16 * (16 / blocks), int64_t{1});
    const int64_t all = t.batch * ceil_div(t.q_length, kRows) * (begin_and_weights + (half_seen ? keys / 2 : keys));
    const int64_t bytes = std::max(begin_and_weights + keys, all / at_once);
    if (bytes < least) best = shares, least = bytes;
  }
  return best;
}

}  // namespace kf::KF_BACKEND::attention_block
