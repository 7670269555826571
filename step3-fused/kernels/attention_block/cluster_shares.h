// How attention_block's v5 divides a problem: rows among clusters, heads and columns among the blocks of one.
#pragma once

#include <kf/launch.h>
#include <step3/step2_attention.h>

#include <algorithm>

#include "cluster_attend.h"
#include "cluster_project.h"
#include "clusters.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_block {

constexpr int kMostWidth = 4 * kGroup * kMostShares;  // so many rounds of the fewest warps

struct Shares {
  int warps;          // of a block
  int blocks;         // of a cluster
  int heads, groups;  // of a block; a group has 64 columns
  // Groups are projected in rounds, one a warp; where they are fewer than warps, 2, 4 or 8 warps share a group, and
  // each has a part of the depth: so many tiles of the depth, of 16 or what a head has left.
  int rounds, log_parts, k_tiles_of_part;

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
__host__ __device__ inline int preloaded_bytes(const Shares& s) {
  return s.rounds == 1 ? (kRows + 3) * s.groups * kGroup * 2 : 0;
}

inline int64_t shared_bytes(const Shares& s, const Attention& t) {
  const int64_t sums = s.parts() * kRows * s.sum_stride() * int64_t{sizeof(float)};
  return int64_t{sizeof(Header)} + rows_bytes(t.heads) + preloaded_bytes(s) +
         std::max(s.warps * int64_t{sizeof(WarpMemory)}, sums);
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
  s.k_tiles_of_part = static_cast<int>(ceil_div(t.heads * ceil_div(t.head_dim, 16), s.parts()));
  return s;
}

// The shortest way. Its overhead is 900 KB: on an H200 begin, end and waits take 11 µs, and 80 KB a microsecond arrive.
inline Shares shares_of(const Args& a, int64_t most) {
  const Attention& t = a.attention;
  const int64_t of_group = kGroup * t.heads * t.head_dim * size_of(a.dtype);  // of its weights
  return shortest_way(
      t, a.dtype, most, 900 * 1024, [&](int warps, int64_t heads) { return shares_with(t, warps, heads); },
      [&](const Shares& s) -> std::optional<int64_t> {
        if (s.blocks > 1 && s.rounds > 1) return {};
        return with_idle_warps(s.groups * of_group, s.groups, s.warps);
      });
}

// For `can_implement`: why there is no way, or "".
inline std::string can_implement_shares(const Args& a) {
  const Attention& t = a.attention;
  if (t.cu_seqlens != nullptr) return kf::attention_block::kNoPackedRows;
  const std::string why_not = can_implement_few_rows(t, a.dtype);
  if (!why_not.empty()) return why_not;
  if (!aligned_16(a.residual, a.proj_weight, a.proj_bias, a.weight, a.bias, a.sum, a.y, a.attended)) {
    return "takes residual, parameters and outputs that begin at multiples of 16 bytes";
  }
  if (t.heads * t.head_dim > kMostWidth) {
    return "takes heads·head_dim ≤ 4096, got " + std::to_string(t.heads * t.head_dim);
  }
  return too_much_shared_memory(shared_bytes(shares_with(t, 4, ceil_div(t.heads, most_blocks())), t),
                                "16 rows of " + std::to_string(t.heads) + " heads");
}

}  // namespace kf::KF_BACKEND::attention_block
