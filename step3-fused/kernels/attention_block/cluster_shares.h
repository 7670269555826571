// How attention_block's v5 divides a problem: rows among clusters, heads and columns among the blocks of one.
#pragma once

#include <kf/launch.h>

#include <algorithm>

#include "cluster_attend.h"
#include "cluster_project.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_block {

struct Shares {
  int row_tiles, warps;  // of a block; a tile has 16 rows
  int blocks;            // of a cluster
  int heads, groups;     // of a block; a group has 64 columns
  int clusters_a_batch;

  // The depth is divided, too, where warps would have nothing to do.
  __host__ __device__ int depth_parts() const { return groups < warps ? warps / groups : 1; }
  // From a row of sums to the next, in floats.
  __host__ __device__ int sum_stride() const { return groups * kGroup + 4; }
};

// From a row to the next in shared memory, in elements: 16 bytes more than a multiple of 128, so that ldmatrix finds
// eight rows in different banks.
__host__ __device__ inline int row_stride_of(int width) { return (width + 63) / 64 * 64 + 8; }
__host__ __device__ inline int rows_bytes(int rows, int width) { return (rows * row_stride_of(width) * 2 + 127) / 128 * 128; }

// Shared memory begins with this; the rows follow, then the keys' ring, and in its place, later, the sums.
template <int kRows>
struct alignas(128) Header {
  uint64_t rows_arrived, shares_arrived;
  RowShare share[kMostBlocks][kRows];
};

template <int kRows>
int64_t shared_bytes_for(const Shares& s, int64_t width) {
  const int64_t ring = s.warps * kPlaces * int64_t{sizeof(KeyPlace<kRows>)};
  const int64_t sums = int64_t{s.depth_parts()} * kRows * s.sum_stride() * int64_t{sizeof(float)};
  return int64_t{sizeof(Header<kRows>)} + rows_bytes(kRows, static_cast<int>(width)) + std::max(ring, sums);
}
inline int64_t shared_bytes(const Shares& s, int64_t width) {
  return s.row_tiles == 2 ? shared_bytes_for<32>(s, width) : shared_bytes_for<16>(s, width);
}

// Most blocks of a cluster: more than 8 only on GPUs made for data centres; before 9.0 there are no clusters.
inline int64_t most_blocks() {
  const int capability = compute_capability();
  return capability < 90 ? 1 : capability < 120 ? kMostBlocks : 8;
}

// With so many heads a block.
inline Shares shares_with(const Attention& t, int row_tiles, int warps, int64_t heads) {
  const int64_t blocks = ceil_div(t.heads, heads), groups = ceil_div(t.heads * t.head_dim, kGroup);
  return {row_tiles,
          warps,
          static_cast<int>(blocks),
          static_cast<int>(heads),
          static_cast<int>(ceil_div(groups, blocks)),
          static_cast<int>(ceil_div(t.q_length, 16 * row_tiles))};
}

// Of all ways the one whose busiest multiprocessor reads the fewest bytes of keys, values and weights; to begin and to
// end takes a block as long as to read 200 KB. Multiprocessors come in groups of 16 or more, and a cluster lies in one.
// No blocks where not even 16 rows fit into shared memory.
inline Shares shares_of(const Args& a) {
  constexpr int64_t kOverhead = 200 * 1024;
  const Attention& t = a.attention;
  const int64_t width = t.heads * t.head_dim, limit = shared_memory_limit();
  const int64_t keys_of_head = t.k_length * 2 * t.head_dim * size_of(a.dtype);
  const bool half_seen = t.causal && t.q_length == t.k_length;
  Shares best{};
  int64_t least = INT64_MAX;
  for (const int row_tiles : {2, 1}) {
    for (int64_t blocks = std::min(most_blocks(), t.heads); blocks > 0; --blocks) {
      const int64_t heads = ceil_div(t.heads, blocks);
      if (ceil_div(t.heads, heads) != blocks) continue;  // the last blocks would have none
      Shares shares = shares_with(t, row_tiles, 8, heads);
      if (shared_bytes(shares, width) > limit) shares = shares_with(t, row_tiles, 4, heads);
      if (shared_bytes(shares, width) > limit) continue;
      const int64_t begin_and_weights = kOverhead + shares.groups * kGroup * width * size_of(a.dtype);
      const int64_t keys = heads * keys_of_head, at_once = std::max(multiprocessors() / 16 * (16 / blocks), int64_t{1});
      const int64_t all = t.batch * shares.clusters_a_batch * (begin_and_weights + (half_seen ? keys / 2 : keys));
      const int64_t bytes = std::max(begin_and_weights + keys, all / at_once);
      if (bytes < least) best = shares, least = bytes;
    }
  }
  return best;
}

}  // namespace kf::KF_BACKEND::attention_block
