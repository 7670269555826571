// How attention_residual_layer_norm's v4 divides a problem: rows among clusters, heads among the blocks of one.
#pragma once

#include <stdexcept>
#include <string>

#include "../attention_block/clusters.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_residual_layer_norm {

using namespace attention_block;

// Of the heads: how many a block has, and how many blocks that makes.
struct Split {
  int warps, blocks, heads;
};

struct alignas(128) Header {
  uint64_t shares_arrived;
  RowShare share[kMostShares][kRows];
};

inline int64_t shared_bytes(const Split& s, const Attention& t) {
  const int64_t sums = int64_t{kRows} * s.heads * t.head_dim * 2;
  return int64_t{sizeof(Header)} + ceil_div(sums, 128) * 128 + s.warps * int64_t{sizeof(WarpMemory)};
}

// The way that takes the shortest, of those with clusters of up to `most` blocks: as attention_block's shares_of, with
// less for begin, end and waits, an estimate that nobody has timed. No blocks where 16 rows do not fit into shared
// memory.
inline Split split_of(const Args& a, int64_t most) {
  constexpr int64_t kOverhead = 600 * 1024;
  const Attention& t = a.attention;
  const int64_t clusters = t.batch * ceil_div(t.q_length, kRows), limit = shared_memory_limit();
  Split best{};
  int64_t least = INT64_MAX;
  for (int64_t blocks = std::min(most, t.heads); blocks > 0; --blocks) {
    const int64_t heads = ceil_div(t.heads, blocks);
    if (ceil_div(t.heads, heads) != blocks) continue;  // the last blocks would have none
    Split split{8, static_cast<int>(blocks), static_cast<int>(heads)};
    if (shared_bytes(split, t) > limit) split.warps = 4;
    if (shared_bytes(split, t) > limit) continue;
    const int64_t bytes = with_idle_warps(heads * keys_seen(t) * 2 * t.head_dim * size_of(a.dtype), heads, split.warps);
    const int64_t waves = waves_of(clusters, blocks), waits = 2 * shared_bytes(split, t) < limit ? 2 : 1;
    const int64_t time = ceil_div(waves, waits) * kOverhead + waves * bytes;
    if (time <= least) best = split, least = time;
  }
  return best;
}

// The same, of those for which the current GPU has room: a part of one may have none for a large cluster.
template <class Kernel>
Split split_that_runs(Kernel kernel, const Args& a) {
  Split split = split_of(a, most_blocks());
  while (split.blocks > 1 &&
         clusters_at_once(kernel, split.blocks, split.warps * kWarpSize, shared_bytes(split, a.attention)) == 0) {
    split = split_of(a, split.blocks - 1);
  }
  if (split.blocks == 0) {
    throw std::runtime_error("v4_heads: this part of a GPU has no room for a cluster that keeps 16 rows of " +
                             std::to_string(a.attention.heads) + " heads");
  }
  return split;
}

// For `supports`: why there is no way, or "".
inline std::string refused_split(const Args& a) {
  const Attention& t = a.attention;
  const std::string refused = refused_few_rows(t, a.dtype);
  if (!refused.empty()) return refused;
  if (!aligned_16(a.residual, a.weight, a.bias, a.y, a.attended)) {
    return "takes residual, parameters and outputs that begin at multiples of 16 bytes";
  }
  const Split smallest{4, 1, static_cast<int>(ceil_div(t.heads, most_blocks()))};
  return too_much_shared_memory(shared_bytes(smallest, t), "16 rows of " + std::to_string(t.heads) + " heads");
}

}  // namespace kf::KF_BACKEND::attention_residual_layer_norm
