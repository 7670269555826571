// What v7 and v8 share: whose turn it is to add to a tile of dq, and what is done then.
#pragma once

#include <step2/acquire.h>

#include "five_products.h"

namespace kf::KF_BACKEND::attention_backward {

// Where shares come together: a tile's sum, and how many have been added. A tile has 64 queries and 64 columns; of
// those of the same queries `parts` lie side by side.
struct Turns {
  float* sums;
  unsigned* added;
  int parts;

  // What is to be done with a tile's sum over this block's keys: it is added, or it completes the gradient. `part`:
  // which of the tiles of these queries.
  __device__ Job job_of(const Args& a, const Unit& unit, int head, int row, int part) const {
    const int q_length = static_cast<int>(a.q_length), shift = static_cast<int>(a.k_length) - q_length;
    const int last_query = min(row + 64, q_length) - 1;
    const int keys_end = a.causal ? min(unit.keys_end, last_query + shift + 1) : unit.keys_end;  // of those it sees
    const int mine = unit.first / Five::kOwned, first = unit.keys_begin / Five::kOwned;
    const int last = (keys_end - 1) / Five::kOwned;
    const int64_t tile = (int64_t{head} * tiles_of_queries(a) + row / 64) * parts + part;
    return {mine == last ? Job::kFinish : Job::kAdd, unit.batch, head, row, tile, static_cast<unsigned>(mine - first)};
  }

  // Puts the sum into `stage`, from where it is sent: a share to be added, or, in the last turn, dq itself, rounded.
  // `leader`, one thread of the warpgroup, waits for the turn; the others wait for it at the named barrier.
  template <class T>
  __device__ void put(const Args& a, const Job& job, float (&sum)[kSlice / 2], float* stage, bool leader,
                      int barrier) const {
    if (job.kind == Job::kAdd) {
      put_sum(sum, stage);
      return;
    }
    if (job.turn > 0) {
      if (leader) wait_for_counter(added + job.tile, job.turn);
      named_barrier_sync(barrier, kWarpgroupSize);
      add_sum(sum, sums + job.tile * kTileFloats);
    }
    const bool all[2] = {true, true};
    put_gradient(sum, static_cast<float>(a.scale), all, reinterpret_cast<T(*)[64 * kSlice]>(stage));
  }

  // What a thread that sends does with a share.
  template <class Free>
  __device__ void send(const Job& job, const float* sum, Free&& free) const {
    float* const there = sums + job.tile * kTileFloats;
    if (job.turn == 0) {
      bulk_store(there, sum, kTileFloats * sizeof(float));
    } else {
      wait_for_counter(added + job.tile, job.turn);
      tma_global_fence();
      bulk_add(there, sum, kTileFloats * sizeof(float));
    }
    tma_store_commit();
    tma_store_wait_read<0>();
    free();
    tma_store_wait<0>();
    store_release(added + job.tile, job.turn + 1);
  }
};

// Of a query that sees nothing; all lanes of its row do this.
template <class T>
__device__ void clear_dq(const Args& a, int64_t head, int64_t query) {
  T* const dq = row_of(static_cast<T*>(a.dq), a.dq_stride, head, a.heads, query);
  for (int64_t d = threadIdx.x; d < a.head_dim; d += kDeltaLanes) dq[d] = T(0.0f);
}

// What the kernel for Δ does besides: nobody has added anything yet, and dq of a query that sees nothing is 0. If all
// queries of a tile see nothing, no block comes to it.
template <class T>
struct BeginTurns {
  static constexpr bool kPacked = false;
  Turns turns;

  __device__ void operator()(const Args& a, int64_t head, int64_t query) const {
    const int64_t tiles = tiles_of_queries(a);
    if (query % 64 == 0 && query < tiles * 64 && threadIdx.x < turns.parts) {
      turns.added[(head * tiles + query / 64) * turns.parts + threadIdx.x] = 0;
    }
    if (query >= a.q_length) return;
    const KeyRange seen = keys_seen(a, keys_of(a, head), query);
    if (seen.begin < seen.end) return;
    clear_dq<T>(a, head, query);
  }
};

// Of a packed row: a tile of queries meets the keys of its documents, of which the host knows nothing.
struct PackedTurns : Turns {
  int* first;  // of keys, the first that a tile of queries meets: [⌈Sq/64⌉], of each head the same
  int* last;
  unsigned* unsound;  // of a tile of queries, all heads: not 0 if a query's lse is not finite

  // The memory for them lies behind that of `turns`.
  PackedTurns(const Args& a, const Turns& turns) : Turns(turns) {
    unsound = added + turns.parts * tiles_of(a);
    first = reinterpret_cast<int*>(unsound + a.heads * tiles_of_queries(a));
    last = first + tiles_of_queries(a);
  }
  static int64_t bytes(const Args& a) {
    return a.cu_seqlens == nullptr ? 0 : (a.heads + 2) * tiles_of_queries(a) * int64_t{sizeof(unsigned)};
  }

  __device__ Job job_of(const Args& a, const Unit& unit, int head, int row, int part) const {
    const int of_head = row / Five::kTile, mine = unit.first / Five::kOwned;
    const int64_t tile = (int64_t{head} * tiles_of_queries(a) + of_head) * parts + part;
    return {mine == last[of_head] ? Job::kFinish : Job::kAdd, 0, head, row, tile,
            static_cast<unsigned>(mine - first[of_head])};
  }

  // Writes first and last of the tile that begins at `query`. Two threads do this. Neither end of the queries that see
  // a key falls from key to key, so a tile meets neighbours: from the first that has not ended before it to the last
  // that has begun before its end. In between none is left out, one that no query sees neither: its queries, none, lie
  // within this tile, and it adds zeros.
  __device__ void find_tiles(const Args& a, int query) const {
    const Documents documents(a);
    const int k_length = static_cast<int>(a.k_length);
    const bool for_last = threadIdx.x == 1;
    // How many are before the first, or how many there are up to the last.
    int low = 0, high = (k_length + Five::kOwned - 1) / Five::kOwned;
    while (low < high) {
      const int tile = (low + high) / 2, key = tile * Five::kOwned;
      const bool before = for_last ? documents.queries_of(key).begin < query + Five::kTile
                                   : documents.queries_of(min(key + Five::kOwned, k_length) - 1).end <= query;
      (before ? low : high) = before ? tile + 1 : tile;
    }
    if (for_last) {
      last[query / Five::kTile] = low - 1;
    } else {
      first[query / Five::kTile] = low;
    }
  }
};

// BeginTurns of a packed row.
template <class T>
struct BeginPackedTurns {
  static constexpr bool kPacked = true;
  PackedTurns turns;

  __device__ void operator()(const Args& a, int64_t head, int64_t query) const {
    const int64_t tiles = tiles_of_queries(a);
    if (query % Five::kTile != 0 || query >= tiles * Five::kTile) return;
    if (threadIdx.x < turns.parts) turns.added[(head * tiles + query / Five::kTile) * turns.parts + threadIdx.x] = 0;
    if (head == 0 && threadIdx.x < 2) turns.find_tiles(a, static_cast<int>(query));
  }

  // A query that sees nothing.
  __device__ void blind(const Args& a, int64_t head, int64_t query) const { clear_dq<T>(a, head, query); }

  __device__ void unsound(const Args& a, int64_t head, int64_t query, bool any) const {
    if (query < a.q_length) turns.unsound[head * tiles_of_queries(a) + query / Five::kTile] = any;
  }
};

__device__ inline const unsigned* unsound_of(const Turns&) { return nullptr; }
__device__ inline const unsigned* unsound_of(const PackedTurns& turns) { return turns.unsound; }

template <bool kPacked>
using TurnsOf = std::conditional_t<kPacked, PackedTurns, Turns>;
template <bool kPacked, class T>
using Begin = std::conditional_t<kPacked, BeginPackedTurns<T>, BeginTurns<T>>;

template <bool kPacked>
TurnsOf<kPacked> turns_of(const Args& a, const Turns& turns) {
  if constexpr (kPacked) {
    return {a, turns};
  } else {
    return turns;
  }
}

}  // namespace kf::KF_BACKEND::attention_backward
