// How attention_residual_layer_norm's v4 divides a problem: rows among clusters, heads among the blocks of one.
#pragma once

#include <optional>
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

inline Split split_with(const Attention& t, int warps, int64_t heads) {
  return {warps, static_cast<int>(ceil_div(t.heads, heads)), static_cast<int>(heads)};
}

// The shortest way. Its overhead is less than that of attention_block's v5: an estimate that nobody has timed.
inline Split split_of(const Args& a, int64_t most) {
  const Attention& t = a.attention;
  return shortest_way(
      t, a.dtype, most, 600 * 1024, [&](int warps, int64_t heads) { return split_with(t, warps, heads); },
      [](const Split&) { return std::optional<int64_t>(0); });
}

// For `can_implement`: why there is no way, or "".
inline std::string can_implement_split(const Args& a) {
  const Attention& t = a.attention;
  const std::string why_not = can_implement_few_rows(t, a.dtype);
  if (!why_not.empty()) return why_not;
  if (!aligned_16(a.residual, a.weight, a.bias, a.y, a.attended)) {
    return "takes residual, parameters and outputs that begin at multiples of 16 bytes";
  }
  return too_much_shared_memory(shared_bytes(split_with(t, 4, ceil_div(t.heads, most_blocks())), t),
                                "16 rows of " + std::to_string(t.heads) + " heads");
}

}  // namespace kf::KF_BACKEND::attention_residual_layer_norm
