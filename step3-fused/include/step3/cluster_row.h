// A row that the blocks of a cluster hold together: what v4_cluster of LayerNorm, with and without a residual, shares.
#pragma once

#include <step2/cluster.h>
#include <step2/mbarrier.h>
#include <step3/held_row.h>

#include <algorithm>
#include <cstdint>
#include <string>

namespace kf::KF_BACKEND {

constexpr int kMostBlocksOfRow = 16;  // of a cluster, where the GPU has room for so many
constexpr int kClusterRowThreads = 256, kClusterRowWarps = kClusterRowThreads / kWarpSize;  // of a block

// The part of one block: kValues neighbours, the first ones for rank 0. The last part is smaller, or there is none.
template <int kItems, int N>
struct ClusterRow : HeldRow<kClusterRowThreads, kItems, N> {
  static constexpr int kValues = kClusterRowThreads * kItems * N;

  __device__ static int first_of(int rank) { return rank * kValues; }
  __device__ static int width_of(int rank, int width) { return max(0, min(kValues, width - first_of(rank))); }
};

// Where the cluster's warps leave what they know of a row: a copy in each block.
template <class C>
struct Meeting {
  Pair<C> mean_and_sum[kMostBlocksOfRow * kClusterRowWarps];  // of its values; the sum is of value − mean
  Pair<C> squares_and_count[kMostBlocksOfRow * kClusterRowWarps];
  uint64_t arrived;  // counts the bytes that were stored

  // By one thread. Then nobody stores into a block before all have begun: cluster_barrier_arrive_relaxed by all
  // threads, and the wait for it in `statistics_of`.
  __device__ void init() {
    mbarrier_init(&arrived, 1);
    mbarrier_init_fence();
  }

  // Each warp takes mean and squares of its own values, in two passes; then they meet once and put them together by
  // the formula of Chan, Golub and LeVeque, https://doi.org/10.1080/00031305.1983.10483115. With d = a warp's mean −
  // the row's: the sum of (x − row's mean) is the warp's own sum + count·d, that of the squares the warp's own +
  // d·(2·sum + count·d). All blocks do it in the same order and find the same. get(i, values) gives a thread's piece.
  template <class Row, class Get>
  __device__ __forceinline__ Statistics<C> statistics_of(Get get, int own_width, int width, C eps, int rank,
                                                         int blocks) {
    C total = 0, count = 0;
    Row::for_each_piece(own_width, [&](int i, int) {
      C value[Row::N];
      get(i, value);
      count += Row::N;
#pragma unroll
      for (int j = 0; j < Row::N; ++j) total += value[j];
    });
    count = warp_sum(count);
    const C own_mean = count > 0 ? warp_sum(total) / count : C(0);
    C sum = 0, squares = 0;
    Row::for_each_piece(own_width, [&](int i, int) {
      C value[Row::N];
      get(i, value);
#pragma unroll
      for (int j = 0; j < Row::N; ++j) {
        const C off = value[j] - own_mean;
        sum += off;
        squares += off * off;
      }
    });
    sum = warp_sum(sum), squares = warp_sum(squares);

    const int lane = threadIdx.x % kWarpSize, part = rank * kClusterRowWarps + threadIdx.x / kWarpSize;
    if (threadIdx.x == 0) {
      mbarrier_arrive_expect_tx(&arrived, blocks * kClusterRowWarps * 2 * static_cast<int>(sizeof(Pair<C>)));
    }
    cluster_barrier_wait();  // all blocks have begun
    if (lane < blocks) {
      const uint32_t barrier = remote_address(&arrived, lane);
      store_remote_async(remote_address(&mean_and_sum[part], lane), Pair<C>{own_mean, sum}, barrier);
      store_remote_async(remote_address(&squares_and_count[part], lane), Pair<C>{squares, count}, barrier);
    }
    mbarrier_wait_cluster(&arrived, 0);  // then nobody reaches into this block: it may end

    const int warps = blocks * kClusterRowWarps;
    total = 0;
    for (int i = lane; i < warps; i += kWarpSize) total += mean_and_sum[i].first * squares_and_count[i].second;
    const C mean = warp_sum(total) / C(width);
    sum = squares = 0;
    for (int i = lane; i < warps; i += kWarpSize) {
      const C off = mean_and_sum[i].first - mean, of_count = squares_and_count[i].second * off;
      sum += mean_and_sum[i].second + of_count;
      squares += squares_and_count[i].first + off * (2 * mean_and_sum[i].second + of_count);
    }
    return statistics(mean, warp_sum(sum), warp_sum(squares), width, eps);
  }
};

// How many blocks share a row, two or more, where a thread holds so many values at most.
inline int64_t blocks_of_row(int64_t width, int64_t values) {
  return std::max<int64_t>(ceil_div(width, kClusterRowThreads * values), 2);
}

// Calls f(ClusterRow, blocks) with what suits a row of `width` elements of T: up to 32 values a thread, or 64 of a half
// type in vectors. `aligned`: all tensors begin at multiples of 16 bytes.
template <class T, class F>
void with_cluster_row(int64_t width, bool aligned, F&& f) {
  constexpr int N = 16 / sizeof(T), kMost = sizeof(T) == 8 ? 16 : 8;  // vectors of a thread
  if (!aligned || width % N != 0) return f(ClusterRow<32, 1>{}, blocks_of_row(width, 32));
  const int64_t blocks = blocks_of_row(width, kMost * N), items = ceil_div(width, blocks * kClusterRowThreads * N);
  items <= kMost / 2       ? f(ClusterRow<kMost / 2, N>{}, blocks)
  : items <= kMost * 3 / 4 ? f(ClusterRow<kMost * 3 / 4, N>{}, blocks)
                           : f(ClusterRow<kMost, N>{}, blocks);
}

// For `can_implement`: why a cluster cannot hold rows of that shape, or "".
inline std::string can_implement_in_cluster(int64_t rows, int64_t width) {
  constexpr int64_t kWidest = kMostBlocksOfRow * kClusterRowThreads * 32;
  if (compute_capability() < 90) return "needs a GPU of compute capability 9.0 or newer";
  if (width > kWidest) return "takes width ≤ " + std::to_string(kWidest) + ", got " + std::to_string(width);
  return can_implement_blocks(rows, blocks_of_row(width, 32));
}

}  // namespace kf::KF_BACKEND
