// sample v3_cluster: a cluster of blocks shares a row
//
// Idea      One multiprocessor looks at 50,000 columns, and with few rows the others have nothing to do.
//           So up to 16 blocks share a row, and tell each other through shared memory: each warp's maximum; its sums;
//           histograms. What all warps know they put together each for itself, in one step. A meeting of the cluster
//           costs more than a pass over a block's share, so a threshold is found in two: the first histogram is of the
//           distance from the maximum, in eighths, over which scores spread evenly, as they do not over their bits. Few
//           keys are left in one bin of it. All blocks gather these, and each thread adds up what is not below its own.
//           Where many are left, since many are alike, the bins of v2 follow.
// Since v2  A cluster in place of a block; the histogram of distances (cluster_search.h).
// Launch    grid batch·c, block 512, clusters of c = ⌈width/4096⌉ blocks, 16 at most, and fewer where batch·c is more
//           than two a multiprocessor. Shared memory: a key for each column of a block, 4 bytes, 8 for float64; and
//           21 KB
// Moves     batch·width·(sizeof(T) + 1 where there is a penalty) bytes; twice that with a penalty
// Limits    compute capability 9.0 or newer; width ≤ 262144; batch·c ≤ 2³¹−1
#include <kf/launch.h>
#include <step2/cluster.h>
#include <step2/reduce.h>

#include <algorithm>
#include <string>

#include "cluster_search.h"
#include "row.h"
#include "rungs.h"
#include "search.h"

namespace kf::KF_BACKEND::sample {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / kWarpSize;
constexpr int kMostBlocks = 16;     // of a cluster
constexpr int64_t kColumns = 4096;  // of a block, as long as there is room for blocks

template <class T>
__global__ void __launch_bounds__(kThreads)
    v3_cluster_kernel(const Args a, const Rule<compute_t<T>> rule, int blocks, int share) {
  using C = compute_t<T>;
  using K = Key<C>;
  extern __shared__ __align__(16) unsigned char dynamic[];
  K* const keys = reinterpret_cast<K*>(dynamic);
  __shared__ Greatest<C> greatest[kWarps];
  __shared__ Sums sums[kWarps];
  __shared__ ClusterSearch<K> shared;
  const int rank = static_cast<int>(cluster_rank_of_block());
  const int64_t row_index = blockIdx.x / blocks;
  const Row<T> row(a, row_index);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int block_begin = rank * share;
  const int begin = min(block_begin + warp * (share / kWarps), static_cast<int>(a.width));  // of this warp's columns
  const int end = min(block_begin + (warp + 1) * (share / kWarps), static_cast<int>(a.width));
  const uint64_t random = rule.greedy ? 0 : random_bits(a.rng_state + 2 * row_index);
  const auto for_own_columns = [&](auto f) {
    for (int c = begin + lane; c < end; c += kWarpSize) f(c, keys[c - block_begin]);
  };
  if (threadIdx.x == 0) shared.histograms = 0;

  Greatest<C> own{-INFINITY, -INFINITY, INT32_MAX, 0};
  row.for_columns(begin, end, [&](int c, C raw, C score) {
    own.raw_max = greater_of(own.raw_max, raw);
    if (score > own.max) own.max = score, own.column = c;
    own.bad |= isnan(score);
    keys[c - block_begin] = key_of(score);
  });
  const auto reduce = [&](Greatest<C> g) {  // over a warp
    const C max = warp_max(g.max);
    const int column = -warp_max(g.max == max ? -g.column : -INT32_MAX);
    return Greatest<C>{warp_max(g.raw_max), max, column, __any_sync(kFullWarp, g.bad)};
  };
  own = reduce(own);
  if (lane == 0) greatest[warp] = own;
  cluster_sync();
  Greatest<C> all = own;
  for (int i = lane; i < blocks * kWarps; i += kWarpSize) {
    const Greatest<C> other = load_from(&greatest[i % kWarps], i / kWarps);
    all.raw_max = greater_of(all.raw_max, other.raw_max);
    if (other.max > all.max || (other.max == all.max && other.column < all.column)) {
      all.max = other.max, all.column = other.column;
    }
    all.bad |= other.bad;
  }
  all = reduce(all);
  const C max = all.max;
  const bool valid = !all.bad && !isinf(max);

  const int last = row.seen == nullptr ? kLowestBit<T> : 0;
  const auto search = [&](K from, auto target_of, auto worth) {
    return cluster_search<kThreads>(shared, blocks, last, max, from, target_of, worth, for_own_columns);
  };
  K least = 0;
  const auto weight = [&](K key) { return rule.weight(score_of(key), max); };
  if (valid && !rule.greedy && rule.top_k > 0) {
    least = search(0, [&](uint64_t) { return rule.top_k; }, [](K) { return uint64_t{1}; });
  }
  if (valid && !rule.greedy && rule.top_p < 1) {
    least = search(least, [&](uint64_t sum) { return rule.target(sum); }, weight);
  }

  const auto drawn_from = [&](K key) {
    const uint64_t value = key >= least ? weight(key) : 0;
    return value >= rule.least_weight ? value : 0;
  };
  Sums own_sums{0, 0};
  if (valid) {
    for_own_columns([&](int c, K key) {
      own_sums.raw += weight_of((row.seen == nullptr ? score_of(key) : row.raw(c)) - all.raw_max);
      if (!rule.greedy) own_sums.kept += drawn_from(key);
    });
  }
  own_sums = {warp_sum(own_sums.raw), warp_sum(own_sums.kept)};
  if (lane == 0) sums[warp] = own_sums;
  cluster_sync();
  Sums of_row{0, 0};
  uint64_t before = 0;
  for (int i = lane; i < blocks * kWarps; i += kWarpSize) {
    const Sums other = load_from(&sums[i % kWarps], i / kWarps);
    of_row.raw += other.raw, of_row.kept += other.kept;
    if (i < rank * kWarps + warp) before += other.kept;
  }
  of_row = {warp_sum(of_row.raw), warp_sum(of_row.kept)};
  before = warp_sum(before);
  cluster_barrier_arrive();  // nobody reads here any more, once all have come: waited for below

  const uint64_t drawn = __umul64hi(random, of_row.kept);
  if (!valid || rule.greedy) {
    const int64_t token = valid ? all.column : -1;
    if (rank == 0 && threadIdx.x == 0) finish<T>(a, row_index, rule.greedy, token, all.raw_max, of_row.raw);
  } else if (drawn >= before && drawn - before < own_sums.kept) {
    const int64_t token =
        column_of(begin, end, drawn - before, [&](int64_t c) { return drawn_from(keys[c - block_begin]); });
    if (lane == 0) finish<T>(a, row_index, false, token, all.raw_max, of_row.raw);
  }
  __syncwarp();
  cluster_barrier_wait();
}

// Of a cluster. Where there are more rows than the GPU has room for, two blocks a multiprocessor, fewer share one.
int64_t blocks_of(const Args& a) {
  int64_t blocks = std::min<int64_t>(ceil_div(a.width, kColumns), kMostBlocks);
  const int64_t least = ceil_div(a.width, kMostColumns), room = 2 * multiprocessors();
  while (a.batch * blocks > room && blocks > least) blocks = std::max(ceil_div(blocks, 2), least);
  return blocks;
}

}  // namespace

std::string v3_cluster_can_implement(const Args& a) {
  if (compute_capability() < 90) return "needs a GPU of compute capability 9.0 or newer";
  if (a.width > kMostBlocks * kMostColumns) {
    return "takes rows of at most 262144 columns, got " + std::to_string(a.width);
  }
  return can_implement_blocks(a.batch, blocks_of(a));
}

void v3_cluster(const Args& a, void* stream) {
  const int64_t blocks = blocks_of(a);
  const int64_t share = ceil_div(a.width, blocks * kThreads) * kThreads;  // the same whole warps' columns for each warp
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    launch_in_clusters(v3_cluster_kernel<T>, blocks, dim3(static_cast<unsigned>(a.batch * blocks)), kThreads,
                       share * static_cast<int64_t>(sizeof(Key<compute_t<T>>)), stream, a, Rule<compute_t<T>>(a),
                       static_cast<int>(blocks), static_cast<int>(share));
  });
}

}  // namespace kf::KF_BACKEND::sample
