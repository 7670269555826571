// A tile of queries of a packed row, for the rungs on tensor cores: what each row sees, and rows that a neighbour's NaN
// has spoiled.
#pragma once

#include <step2/attention/documents.h>
#include <step2/attention/tensor_cores.h>
#include <step2/reduce.h>

#include <type_traits>

namespace kf::KF_BACKEND::attention {

// As BlockOfQueries, whose keys are those of all its documents here: from the first that its first query sees to the
// end of its last query's document. Of these each query sees some in the middle.
struct PackedQueries : BlockOfQueries {
  static constexpr bool kPacked = true;
  const Seen* rows;  // what each query sees, by find_seen; in shared memory
  bool straddles;    // whether a query has keys of other documents beside its own

  PackedQueries() = default;
  // aligned: begin with a multiple of that many keys.
  __device__ PackedQueries(const Args& a, int64_t head, int64_t first, int most, const Seen* rows, int aligned)
      : rows(rows) {
    this->head = static_cast<int>(head);
    this->first = static_cast<int>(first);
    queries = static_cast<int>(min(int64_t{most}, a.q_length - first));
    first_key = rows[0].begin / aligned * aligned;
    keys = rows[most].end - first_key;
    straddles = rows[most].begin != first_key;
  }

  // Query `i` sees the keys seen_from(i) ≤ j < seen_by(i).
  __device__ int seen_from(int i) const { return rows[i].begin - first_key; }
  __device__ int seen_by(int i) const { return rows[i].end - first_key; }
  __device__ bool begins_behind(int i, int key) const { return key < seen_from(i); }
};

template <bool kPacked>
using Queries = std::conditional_t<kPacked, PackedQueries, BlockOfQueries>;

// What the queries of a tile see; behind them, all keys of the last one's document. Beyond the row's end they are as
// its last query. Who reads them waits at a barrier first.
template <int kRows>
__device__ void find_seen(const Args& a, int64_t first, Seen (&rows)[kRows], int thread, int threads) {
  const Documents documents(a);
  for (int i = thread; i < kRows; i += threads) {
    const auto query = static_cast<int>(min(first + min(i, kRows - 2), a.q_length - 1));
    rows[i] = documents.keys_of(query, a.causal && i < kRows - 1);
  }
}

// A block's shared memory, with room behind it for what kQueries queries see, of each of kTiles tiles.
template <bool kPacked, class Shared, int kQueries, int kTiles = 1>
struct WithSeen : Shared {};
template <class Shared, int kQueries, int kTiles>
struct WithSeen<true, Shared, kQueries, kTiles> : Shared {
  Seen seen[kTiles][kQueries + 1];
};

// The queries of a block. All its threads call this. Dropout wants pieces of 32 keys.
template <bool kPacked, bool kDropout, int kQueries, class Shared>
__device__ __forceinline__ Queries<kPacked> queries_of_block(const Args& a, int64_t head, int64_t first,
                                                             WithSeen<kPacked, Shared, kQueries>& shared) {
  if constexpr (kPacked) {
    find_seen(a, first, shared.seen[0], threadIdx.x, blockDim.x);
    __syncthreads();
    return PackedQueries(a, head, first, kQueries, shared.seen[0], kDropout ? 32 : 1);
  } else {
    return BlockOfQueries(a, head, first, kQueries);
  }
}

// The same by a warp, of any tile.
template <bool kDropout, int kRows>
__device__ __forceinline__ PackedQueries queries_of_warp(const Args& a, int head, int first, Seen (&rows)[kRows]) {
  find_seen(a, first, rows, threadIdx.x % kWarpSize, kWarpSize);
  __syncwarp();
  return PackedQueries(a, head, first, kRows - 1, rows, kDropout ? 32 : 1);
}

// Tiles of keys that the 64 queries of a block from `first_row` on see are none below the first of these two, and those
// from the second on all of the 64 see from their beginning.
template <int kKeys, class Block>
__device__ __forceinline__ int lowest_tile(const Block& block, int first_row) {
  if constexpr (Block::kPacked) return max(block.seen_from(first_row), 0) / kKeys;
  return 0;
}
template <int kKeys, class Block>
__device__ __forceinline__ int lowest_tile_for_all(const Block& block, int first_row) {
  if constexpr (Block::kPacked) {
    return max(static_cast<int>(ceil_div(block.seen_from(first_row + 63), kKeys)),
               lowest_tile<kKeys>(block, first_row));
  }
  return 0;
}

// A product takes in the values of all keys of a tile, those that a row does not see by a weight of 0; and 0 times NaN
// or infinity, of another document, is NaN. So a row that has become NaN in a tile with several documents is computed
// again by its warp, with its own keys alone. Where NaN is its own it comes out again.
//
// Of row `lane / 4` + 8·r of the warp, which begins at `first_row` of the block, this lane has `lse[r]`, and met[r],
// the sum of its outputs: NaN if one is. store(row, column, number) for each column, by any lane.
template <bool kDropout, class T, int N, class Store>
__device__ __forceinline__ void repair_rows(const Args& a, const PackedQueries& block, int first_row,
                                            const float (&met)[N], const float (&lse)[N], Store store) {
  if (!block.straddles) return;
  constexpr int kMost = 4;  // columns of a lane: head_dim is at most 128
  const int lane = threadIdx.x % kWarpSize;
  __syncwarp();  // all rows are where store writes
#pragma unroll 1
  for (int r = 0; r < N; ++r) {
    bool nan = false;
    float own_lse = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {  // no index but a known one, or both would have to lie in memory
      if (i == r) nan = met[i] != met[i], own_lse = lse[i];
    }
    for (unsigned lanes = __ballot_sync(kFullWarp, nan); lanes != 0;) {
      const int of_eight = (__ffs(static_cast<int>(lanes)) - 1) / 4, row = 8 * r + of_eight;
      lanes &= ~(0xfu << 4 * of_eight);
      const float lse_of_row = __shfl_sync(kFullWarp, own_lse, 4 * of_eight);
      if (first_row + row >= block.queries) continue;
      const HeadRows<T> head(a, block.head);
      const int query = block.first + first_row + row;
      const Seen seen = block.rows[first_row + row];
      float out[kMost] = {};
#pragma unroll 1
      for (int key = seen.begin; key < seen.end; ++key) {
        float score = 0;
#pragma unroll 1
        for (int c = lane; c < a.head_dim; c += kWarpSize) {
          score += to_compute(head.q().at(query)[c]) * to_compute(head.k().at(key)[c]);
        }
        float weight = exponential(warp_sum(score) * static_cast<float>(a.scale) - lse_of_row);
        if constexpr (kDropout) weight *= AttentionDropout(a).factor<float>(block.head, query, key);
#pragma unroll
        for (int i = 0; i < kMost; ++i) {
          const int c = lane + i * kWarpSize;
          if (c < a.head_dim) out[i] += weight * to_compute(head.v().at(key)[c]);
        }
      }
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        const int c = lane + i * kWarpSize;
        if (c < a.head_dim) store(row, c, from_compute<T>(out[i]));
      }
    }
  }
}

// As with_columns, but that of packed rows a tile has 64 columns or 128; f(type, columns, drops, packed).
template <class F>
void with_columns_and_documents(const Args& a, F&& f) {
  if (a.cu_seqlens != nullptr) {
    return with_slices(a, [&](auto type, auto columns, auto drops) { f(type, columns, drops, std::true_type{}); });
  }
  with_columns(a, [&](auto type, auto columns, auto drops) { f(type, columns, drops, std::false_type{}); });
}

// The same, and without documents as with_slices.
template <class F>
void with_slices_and_documents(const Args& a, F&& f) {
  with_slices(a, [&](auto type, auto columns, auto drops) {
    if (a.cu_seqlens != nullptr) return f(type, columns, drops, std::true_type{});
    f(type, columns, drops, std::false_type{});
  });
}

}  // namespace kf::KF_BACKEND::attention
