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
  // The same, where tiles are counted from the document's first one.
  __device__ Job job_of(const Args& a, const PackedUnit& unit, int head, int row, int part) const {
    const int last_query = min(row + 64, unit.queries_end) - 1;
    const int keys_end = a.causal ? last_query - unit.queries_end + unit.keys_end + 1 : unit.keys_end;
    const int last = (keys_end - 1 - unit.first) / Five::kOwned;  // from this one on
    const int slot = unit.slot + (row - unit.base) / 64;
    const int64_t tile = (head * slots_of(a, a.q_length, Five::kTile) + slot) * parts + part;
    return {last == 0 ? Job::kFinish : Job::kAdd,
            0,
            head,
            row,
            tile,
            static_cast<unsigned>(unit.number),
            max(unit.queries_begin - row, 0),
            min(unit.queries_end - row, 64)};
  }

  // Puts the sum into `stage`, from where it is sent: a share to be added, or, in the last turn, dq itself, rounded.
  // `leader`, one thread of the warpgroup, waits for the turn; the others wait for it at the named barrier.
  template <class T, class Unit>
  __device__ Job put(const Args& a, const Unit& unit, int head, int row, int part, float (&sum)[kSlice / 2],
                     float* stage, bool leader, int barrier) const {
    const Job job = job_of(a, unit, head, row, part);
    if (job.kind == Job::kAdd) {
      put_sum(sum, stage);
      return job;
    }
    if (job.turn > 0) {
      if (leader) wait_for_counter(added + job.tile, job.turn);
      named_barrier_sync(barrier, kWarpgroupSize);
      add_sum(sum, sums + job.tile * kTileFloats);
    }
    const bool all[2] = {true, true};
    put_gradient(sum, static_cast<float>(a.scale), all, reinterpret_cast<T(*)[64 * kSlice]>(stage));
    return job;
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
struct BeginTurns : QueryRows {
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

// Of a packed row: rows are those of slots, 64 each. It also finds the units.
template <class T>
struct BeginPackedTurns {
  static constexpr bool kPacked = true;
  Turns turns;
  PackedUnits packed;

  __device__ void operator()(const Args& a, int64_t head, int64_t row) const {
    if (row % 64 != 0 || threadIdx.x >= turns.parts) return;
    turns.added[(head * tiles_of_queries(a) + row / 64) * turns.parts + threadIdx.x] = 0;
  }

  __device__ static RowsOfQueries rows(const Args& a, int64_t first) {
    const auto slot = static_cast<int>(first / DocumentTiles::kQueries);
    const DocumentTiles own = DocumentTiles::of_query_slot(a, slot);
    const int tile = slot - own.query_slot;
    return {own.first_query + tile * DocumentTiles::kQueries, own.queries.begin,
            tile < own.query_tiles ? own.queries.end : 0};
  }

  // A query that sees nothing.
  __device__ void blind(const Args& a, int64_t head, int64_t query) const { clear_dq<T>(a, head, query); }

  __device__ void find_units(const Args& a) const {
    const int threads = static_cast<int>(blockDim.x * blockDim.y), warps = threads / kWarpSize;
    const int block = static_cast<int>(blockIdx.y * gridDim.x + blockIdx.x),
              blocks = static_cast<int>(gridDim.x * gridDim.y);
    packed.find(a, block * warps + static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x) / kWarpSize,
                blocks * warps);
  }
};

template <bool kPacked, class T>
auto begin_of(const Turns& turns, const PackedUnits& packed) {
  if constexpr (kPacked) {
    return BeginPackedTurns<T>{turns, packed};
  } else {
    return BeginTurns<T>{{}, turns};
  }
}

}  // namespace kf::KF_BACKEND::attention_backward
