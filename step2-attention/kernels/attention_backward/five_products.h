// What v6, v7 and v8 share: a block owns 128 keys, as in v5, and computes each weight once, for dk, dv and dq. That is
// five products; v5's two kernels, one for keys and one for queries, need seven.
//
//   two consumer warpgroups  64 keys each: weights and their gradients, dk and dv, as in v5. The gradients, rounded, go
//                            into shared memory, too
//   dq's warpgroup           takes them from there: a tile's sum, grad_scoreᵀ·k over the 128 keys. Other blocks have
//                            other keys' sums for the same dq; how they come together is what v6 and v7 differ in. v8
//                            has no such warpgroup: each consumer sums half of dq's columns
//   producer, one warp       loads k and v of the keys, and tiles of 64 queries: q, grad, lse, Δ
#pragma once

#include <algorithm>
#include <climits>

#include "delta.h"
#include "hopper.h"
#include "packed.h"

namespace kf::KF_BACKEND::attention_backward {

constexpr int kTileFloats = 64 * kSlice;  // of a tile of dq

// Named barriers: 1 and 2 are each consumer's own, 4 and 5 their turns.
constexpr int kSumBarrier = 3, kTurnBarrier = 4;

// Numbers are of warpgroups in this order: consumers, dq's, the producer's.
struct Five {
  static constexpr int kConsumers = 2;
  static constexpr int kReaders = kConsumers + 4;  // of own rows and of the unit: dq's warps read both to their end
  static constexpr int kBuffers = 2;
  static constexpr int kOwned = kConsumers * 64;
  static constexpr int kTile = 64;
  static constexpr int kStages = 4;
  static constexpr int kSlices = 1;
  static constexpr int kSenders = 2;      // warps that send dq's sums, each from a stage of its own
  static constexpr int kRegisters = 192;  // 2·192 + 88 + 40: what four warpgroups have
  static constexpr int kSumRegisters = 88;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kThreads = (kConsumers + 2) * kWarpgroupSize;
};

static_assert(Five::kTile == DocumentTiles::kQueries && Five::kOwned == DocumentTiles::kKeys);

__host__ __device__ inline int tiles_of_queries(const Args& a) {  // of a head; of a packed row slots for them
  if (a.cu_seqlens != nullptr) return static_cast<int>(slots_of(a, a.q_length, Five::kTile));
  return static_cast<int>((a.q_length + Five::kTile - 1) / Five::kTile);
}

// What a block works on, computed by its producer, which has the time: some ten divisions of 64 bits.
struct Unit {
  int count;                 // of tiles of queries, 0 where no key exists; −1: nothing is left
  int base;                  // first row of tile 0, a multiple of 64
  int first;                 // of its keys
  int begin, end;            // of its keys, those that exist
  int keys_begin, keys_end;  // of all keys of the batch
  int batch, head;           // of k and v
};

// A unit in a form that shows the compiler that it is the same in all lanes.
__device__ inline Unit in_all_lanes(const Unit& unit) {
  return {warp_uniform(unit.count),    warp_uniform(unit.base),  warp_uniform(unit.first),
          warp_uniform(unit.begin),    warp_uniform(unit.end),   warp_uniform(unit.keys_begin),
          warp_uniform(unit.keys_end), warp_uniform(unit.batch), warp_uniform(unit.head)};
}

// Of a packed row: keys of one document, and the tiles of its queries.
struct PackedUnit : Unit {
  int queries_begin, queries_end;  // of the document
  int slot;                        // of tile 0
  int number;                      // which of its tiles of keys
};
template <bool kPacked>
using UnitOf = std::conditional_t<kPacked, PackedUnit, Unit>;

__device__ inline PackedUnit in_all_lanes(const PackedUnit& unit) {
  Unit same = in_all_lanes(static_cast<const Unit&>(unit));
  same.batch = 0;
  return {same, warp_uniform(unit.queries_begin), warp_uniform(unit.queries_end), warp_uniform(unit.slot),
          warp_uniform(unit.number)};
}

// The units of a head of a packed row, those first whose documents have most work left: in memory, since only the GPU
// knows the documents. Units of a document are in the order of their keys, as dq's turns want it.
struct PackedUnits {
  unsigned* count;
  unsigned* together;  // heads at a time, at least
  PackedUnit* units;

  __host__ __device__ explicit PackedUnits(unsigned* memory)
      : count(memory), together(memory + 1), units(reinterpret_cast<PackedUnit*>(memory + 2)) {}

  __host__ __device__ static int most(const Args& a) { return static_cast<int>(slots_of(a, a.k_length, Five::kOwned)); }
  static int64_t bytes(const Args& a) {
    return a.cu_seqlens == nullptr ? 0 : most(a) * int64_t{sizeof(PackedUnit)} + 2 * int64_t{sizeof(unsigned)};
  }

  // A kernel before writes them, each warp some. Which place a unit has it finds by counting those before it.
  __device__ void find(const Args& a, int warp, int warps) const {
    const int lane = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x) % kWarpSize;
    const Documents documents(a);
    for (int slot = warp; slot < most(a); slot += warps) {
      const int document = documents.of_key_slot(slot, Five::kOwned);
      const DocumentTiles own(a, document);
      const int number = slot - own.key_slot, seeing = own.seeing(number);
      const int64_t left = own.left(number);
      int before = 0, all = 0;
      int64_t work = 0, most_work = 0;  // of all documents, of the one with most
      bool falls = false;               // a document ends before it begins: turns would be waited for that never come
      for (int d = lane; d < a.documents; d += kWarpSize) {
        const DocumentTiles other(a, d);
        falls |= other.queries.end < other.queries.begin || other.keys.end < other.keys.begin;
        all += other.key_tiles;
        work += other.left(0);
        most_work = max(most_work, other.left(0));
        before += d == document ? number : other.with_left(d < document ? left : left + 1);
      }
      before = warp_sum(before);
      all = __any_sync(kFullWarp, falls) != 0 ? 0 : warp_sum(all);
      work = warp_sum(work), most_work = warp_max(most_work);
      if (lane != 0) continue;
      if (slot == 0) {
        *count = static_cast<unsigned>(all);
        // A document that is nearly all has neighbours at work that wait for each other, in one head or in all.
        *together = static_cast<unsigned>(ceil_div(12 * most_work, max(work, int64_t{1})));
      }
      if (number >= own.key_tiles || before < 0 || before >= all) continue;  // below 0: starts that are none
      const int first = own.first_key + number * Five::kOwned, tile = own.query_tiles - seeing;
      units[before] = {{seeing, own.first_query + tile * Five::kTile, first, max(first, own.keys.begin),
                        min(first + Five::kOwned, own.keys.end), own.keys.begin, own.keys.end, 0, 0},
                       own.queries.begin,
                       own.queries.end,
                       own.query_slot + tile,
                       number};
    }
  }
};

// The first query that sees `key` of the unit.
__device__ inline int first_query(const Args& a, const Unit&, int key) {
  return a.causal ? max(0, key - static_cast<int>(a.k_length - a.q_length)) : 0;
}
__device__ inline int first_query(const Args& a, const PackedUnit& unit, int key) {
  return a.causal ? max(unit.queries_begin, key - unit.keys_end + unit.queries_end) : unit.queries_begin;
}

// The tiles of a unit that the 64 keys from `first` on have a part in: from `seen` on; from `whole` on each query sees
// each of these keys, and all of them exist.
struct Part {
  int seen, whole;

  template <class Unit>
  __device__ Part(const Args& a, const Unit& unit, int first) : seen(unit.count), whole(unit.count) {
    const int from = max(first, unit.begin), last = min(first + 64, unit.end) - 1;
    if (from > last) return;
    seen = warp_uniform((first_query(a, unit, from) - unit.base) / Five::kTile);
    if (last - from < 63) return;
    whole = warp_uniform((first_query(a, unit, last) - unit.base + Five::kTile - 1) / Five::kTile);
  }

  __device__ bool is_whole(int tile) const { return tile >= whole; }
};

// What is to be done with a sum of dq.
struct Job {
  enum Kind { kAdd, kFinish, kEnd } kind = kEnd;  // kFinish: it is dq itself, rounded
  int batch = 0, head = 0, row = 0;               // of q; a head of all
  int64_t tile = 0;                               // of all; v8_wide: a half of one
  unsigned turn = 0;                              // v7, v8: how many come before
  int begin = 0, end = 64;                        // its rows; of a packed row the others may be another document's
};

template <bool kPacked, class T>
struct Block : Shared<Five, T> {
  using Element = T;
  alignas(1024) T grad_score[2][Five::kConsumers][64 * kSlice];  // two stages; rows of keys, columns of queries
  T dk[Five::kConsumers][1][64 * kSlice];                        // on its way out; k's stage is still read then
  float dq[Five::kSenders][kTileFloats];                         // sums on their way out, in the order of lane_of_tile
  Job job[Five::kSenders];
  Pipeline<2> scores_pipe;
  Pipeline<Five::kSenders> sums_pipe;
  UnitOf<kPacked> unit[Five::kBuffers];

  __device__ void init_barriers() {
    Shared<Five, T>::init_barriers();
    scores_pipe.init(1, Five::kConsumers * 4);  // by warps
    sums_pipe.init(1, 4);
    mbarrier_init_fence();
  }
};

// ---- the producer, one warp ----

__device__ inline Unit unit_of(const Args& a, int64_t tile) {
  const Role<true, void> role(a, tile, Five::kOwned);
  const Walk<true, Five::kTile, Five::kTile> walk(role);
  return {walk.count,
          walk.base,
          warp_uniform(static_cast<int>(role.first)),
          warp_uniform(static_cast<int>(role.exist.begin)),
          warp_uniform(static_cast<int>(max(role.exist.end, int64_t{0}))),
          warp_uniform(static_cast<int>(role.keys.begin)),
          warp_uniform(static_cast<int>(role.keys.end)),
          warp_uniform(role.batch()),
          warp_uniform(role.head_of_batch())};
}

// B: the block's shared memory, of shape S.
template <class S, class B>
struct KeysProducer {
  const Args& a;
  B& shared;
  const Inputs& in;
  const int lane = threadIdx.x % kWarpSize;
  PipelineState<S::kStages> ring = {};
  int raw_phase = 0;

  // Zeros in rows first ≤ i < end of a tile: what lies there may be NaN, which a weight or a gradient of 0 would not
  // make 0. The tile has arrived at `raw`, and is handed on to `full`.
  template <class Clear>
  __device__ void clear(uint64_t* full, Clear&& clear_rows) {
    mbarrier_wait(&shared.raw, raw_phase);
    raw_phase ^= 1;
    clear_rows();
    tma_store_fence();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(full);
  }

  template <class Unit>
  __device__ void load_own(const Unit& unit, int buffer) {
    const int before = unit.begin - unit.first, after = unit.end - unit.first;  // rows between exist
    const bool has_padding = unit.count > 0 && (before > 0 || after < S::kOwned);
    uint64_t* const full = has_padding ? &shared.raw : &shared.own_pipe.full[buffer];
    if (lane == 0) {
      mbarrier_arrive_expect_tx(full, sizeof shared.a[0] + sizeof shared.b[0]);
      for (int w = 0; w < S::kConsumers; ++w) {
        const int row = unit.first + w * 64;
        attention::load_slices<S::kSlices, 64>(shared.a[buffer][w], &in.a, full, row, unit.head, unit.batch);
        attention::load_slices<S::kSlices, 64>(shared.b[buffer][w], &in.b, full, row, unit.head, unit.batch);
      }
    }
    if (!has_padding) return;
    clear(&shared.own_pipe.full[buffer], [&] {
      for (int w = 0; w < S::kConsumers; ++w) {
        attention::clear_rows<S::kSlices, 64>(shared.a[buffer][w], 0, lane, kWarpSize, min(64, before - w * 64));
        attention::clear_rows<S::kSlices, 64>(shared.a[buffer][w], max(0, after - w * 64), lane, kWarpSize);
      }
    });
  }

  // Of a packed row what lies behind the document's last query, and before its first one, is others'.
  template <class Unit>
  __device__ void load_walked(const Unit& unit) {
    constexpr bool kPacked = std::is_same_v<Unit, PackedUnit>;
    const int heads_together = static_cast<int>(a.heads) / static_cast<int>(a.kv_heads);
    for (int i = 0; i < heads_together; ++i) {
      const int head = unit.head * heads_together + i;
      for (int tile = unit.count - 1; tile >= 0; --tile, ring.advance()) {
        const int stage = ring.index, row = unit.base + tile * S::kTile;
        const int early = tile == 0 ? first_query(a, unit, unit.begin) - row : 0;  // rows that see no key of the block
        int end = S::kTile, first_row = row;                                       // of lse and Δ
        if constexpr (kPacked) end = unit.queries_end - row, first_row = (unit.slot + tile) * S::kTile;
        const bool clears = early > 0 || (kPacked && end < S::kTile);
        uint64_t* const full = clears ? &shared.raw : &shared.pipe.full[stage];
        if (lane == 0) {
          shared.pipe.producer_acquire(ring);
          mbarrier_arrive_expect_tx(
              full, sizeof shared.x[0] + sizeof shared.y[0] + sizeof shared.lse[0] + sizeof shared.delta[0]);
          attention::load_slices<S::kSlices, S::kTile>(shared.x[stage], &in.x, full, row, head, unit.batch);
          attention::load_slices<S::kSlices, S::kTile>(shared.y[stage], &in.y, full, row, head, unit.batch);
          const int64_t query = (unit.batch * a.heads + head) * in.length + first_row;
          bulk_load(shared.lse[stage], in.lse + query, sizeof shared.lse[0], full);
          bulk_load(shared.delta[stage], in.delta + query, sizeof shared.delta[0], full);
        }
        if (!clears) continue;
        clear(&shared.pipe.full[stage], [&] {
          attention::clear_rows<S::kSlices, S::kTile>(shared.x[stage], 0, lane, kWarpSize, early);
          attention::clear_rows<S::kSlices, S::kTile>(shared.y[stage], 0, lane, kWarpSize, early);
          if constexpr (kPacked) {
            attention::clear_rows<S::kSlices, S::kTile>(shared.x[stage], end, lane, kWarpSize);
            attention::clear_rows<S::kSlices, S::kTile>(shared.y[stage], end, lane, kWarpSize);
          }
        });
      }
    }
  }
};

template <class S, bool kPacked, class B>
__device__ void produce(const Args& a, Queue queue, B& shared, const Inputs& in, const PackedUnits& packed) {
  KeysProducer<S, B> producer{a, shared, in};
  const bool leader = producer.lane == 0;
  PipelineState<S::kBuffers> buffers;
  if constexpr (kPacked) {
    queue.tiles = *packed.count;
    queue.together = min(queue.heads, max(queue.together, *packed.together));
  }
  for (;; buffers.advance()) {
    // The next unit is found while the consumers still work on the one before.
    const unsigned number = warp_uniform(leader ? atomicAdd(queue.next, 1u) : 0u);
    if (number >= queue.tiles * queue.heads) break;
    const int64_t tile = queue.tile(number);
    UnitOf<kPacked> unit;
    if constexpr (kPacked) {
      const auto of_all = static_cast<unsigned>(tile);
      unit = in_all_lanes(packed.units[of_all % queue.tiles]);
      unit.head = warp_uniform(static_cast<int>(of_all / queue.tiles));
    } else {
      unit = unit_of(a, tile);
    }
    if (leader) {
      shared.own_pipe.producer_acquire(buffers);
      shared.unit[buffers.index] = unit;
    }
    __syncwarp();
    producer.load_own(unit, buffers.index);
    producer.load_walked(unit);
  }
  if (leader) {
    shared.own_pipe.producer_acquire(buffers);
    shared.unit[buffers.index].count = -1;
    shared.own_pipe.producer_commit(buffers);
  }
}

// ---- a consumer warpgroup: this lane's two keys, 8 apart, against two queries of every 8 ----

// A lane's first key and query of what its warpgroup computes, and where that lies in a tile of 64×64.
struct Lane {
  int key, query;
  uint32_t offset;  // in bytes

  __device__ Lane() {
    const int lane = threadIdx.x % kWarpSize;
    key = static_cast<int>(threadIdx.x / kWarpSize % 4) * 16 + lane / 4;
    query = lane % 4 * 2;
    offset = swizzled_offset(key * 128, Swizzle::k128) + lane % 4 * 4;
  }
};

// Which of a lane's two keys exist, and the first query that sees each.
struct KeysOfLane {
  int begin[2];
  bool exists[2];

  template <class Unit>
  __device__ KeysOfLane(const Args& a, const Unit& unit, int first) {
    for (int r = 0; r < 2; ++r) {
      const int key = first + 8 * r;
      exists[r] = key >= unit.begin && key < unit.end;
      begin[r] = exists[r] ? first_query(a, unit, key) : INT_MAX;
    }
  }
};

// What each of a lane's queries of a tile has, lse or Δ; `first` is where the first one's lies. Shared memory takes its
// time while products read it: so this is asked for before a product is waited for, where there are registers for it.
template <int N>
struct OfQueries {
  Vector<float, 2> of_two[N / 4];

  __device__ __forceinline__ explicit OfQueries(const float* first) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) of_two[i] = load_vector<2>(first + i * 8);
  }
  __device__ __forceinline__ float of(int i) const { return of_two[i / 4].element[i % 2]; }  // of score i of a lane
};

// Scores become weights. `query`: the number of the lane's first query of the tile. `whole`: each query sees each key.
template <int N>
__device__ __forceinline__ void weigh(float (&score)[N], const OfQueries<N>& lse, float scale, bool whole, int query,
                                      const KeysOfLane& keys) {
#pragma unroll
  for (int i = 0; i < N; ++i) score[i] = exp2_approx(score[i] * scale - lse.of(i));
  if (whole) return;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (query + i / 4 * 8 + i % 2 < keys.begin[i / 2 % 2]) score[i] = 0.0f;
  }
}

// The weights' gradients become the scores'.
template <int N>
__device__ __forceinline__ void differentiate(const float (&weights)[N], float (&grad)[N], const OfQueries<N>& delta,
                                              bool whole) {
#pragma unroll
  for (int i = 0; i < N; ++i) grad[i] = weights[i] * (grad[i] - delta.of(i));
  if (whole) return;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (weights[i] == 0.0f) grad[i] = 0.0f;  // where v is padding, grad may be NaN
  }
}

// A lane's part of 64 keys × 64 queries, rounded, to where dq's product reads it. `offset`: Lane's.
template <class T>
__device__ __forceinline__ void put_grad_score(const uint32_t (&grad_score)[4][4], T* tile, uint32_t offset) {
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    const int chunk = i / 4, below = i / 2 % 2;  // 8 rows below the swizzle is the same
    auto* const to = reinterpret_cast<unsigned char*>(tile) + (offset ^ chunk * 16) + below * 8 * 128;
    *reinterpret_cast<uint32_t*>(to) = grad_score[i / 8][i / 4 % 2 * 2 + below];
  }
  tma_store_fence();
}

// Issues grad_scoreᵀ·k: a tile of 64 queries × 64 columns, over the keys of all consumers. `slice`: which 64 columns of
// k.
template <class T, int kConsumers, int kSlices>
__device__ __forceinline__ void issue_dq(float (&sum)[kSlice / 2], const T (&grad_score)[kConsumers][64 * kSlice],
                                         const T (&k)[kConsumers][kSlices][64 * kSlice], int slice) {
#pragma unroll
  for (int w = 0; w < kConsumers; ++w) {
    const uint64_t scores = matrix_descriptor(grad_score[w], 0, 1024, Swizzle::k128);
    const uint64_t keys = matrix_descriptor(k[w][slice], 0, 1024, Swizzle::k128);
#pragma unroll
    for (int key = 0; key < 4; ++key) {  // 16 at a time
      const int step = key * (16 * 128 >> 4);
      wgmma<kSlice, T, Major::kMN, Major::kMN>(sum, scores + step, keys + step, w + key > 0);
    }
  }
  wgmma_commit();
}

// A gradient of 64 of the unit's keys, from `first` on, by `tile`. Of a packed row the rows behind these may be another
// document's, and TMA knows no end but the row's: then they are copied.
template <bool kPacked, class Unit, class T, int N>
__device__ void store_of_keys(const Args& a, const Unit& unit, int first, const float (&sum)[N], float factor,
                              const bool (&exists)[2], T (*tile)[64 * kSlice], const CUtensorMap* map, void* to,
                              const Strides& stride, int barrier, bool leader) {
  const int begin = max(unit.begin - first, 0), end = min(unit.end - first, 64);
  const bool partly = kPacked && (begin > 0 || end < 64);
  store_gradient(sum, factor, exists, tile, map, first, unit.head, unit.batch, barrier, leader, partly);
  if (!partly) return;
  const Rows<T> rows = rows_of_packed<T>(to, stride, unit.head);
  attention::copy_rows<N / 32>(tile, begin, end, rows, first, a.head_dim, threadIdx.x % kWarpgroupSize, kWarpgroupSize);
  named_barrier_sync(barrier, kWarpgroupSize);  // all have read the tile
}

template <bool kDropout, bool kPacked, class B>
__device__ void consume(const Args& a, B& shared, const Inputs& in) {
  using T = typename B::Element;
  constexpr int kTile = Five::kTile;
  using Scores = float[kTile / 2];  // a lane's, of 64 keys against a tile
  const int warpgroup = warpgroup_of_block();
  const bool leader = leads_warpgroup(warpgroup);
  const Lane lane;
  const float scale = static_cast<float>(a.scale * kLog2e);
  const int heads_together = static_cast<int>(a.heads / a.kv_heads);

  const auto pingpong_wait = [&] { named_barrier_sync(kTurnBarrier + warpgroup, 2 * kWarpgroupSize); };
  const auto pingpong_arrive = [&] { named_barrier_arrive(kTurnBarrier + 1 - warpgroup, 2 * kWarpgroupSize); };
  if (warpgroup == 0) named_barrier_arrive(kTurnBarrier, 2 * kWarpgroupSize);  // the first turn
  attention::AttentionDropout dropout(a);
  PipelineState<2> buffers, handed;
  PipelineState<Five::kStages> ring;
  int stored = -1;  // the buffer from which this warpgroup's last sums are being stored
  const auto free_stored = [&] {
    if (leader && stored >= 0) {
      tma_store_wait_read<0>();
      shared.own_pipe.consumer_release(stored);
    }
    stored = -1;
  };
  for (;; buffers.advance()) {
    shared.own_pipe.consumer_wait(buffers);
    const auto unit = in_all_lanes(shared.unit[buffers.index]);
    if (unit.count < 0) break;
    const int first = unit.first + warpgroup * 64;
    const Part part(a, unit, first);
    const KeysOfLane keys(a, unit, first + lane.key);

    float dk[kSlice / 2] = {}, dv[kSlice / 2] = {};
    uint32_t weight[kTile / 16][4], grad_score[kTile / 16][4];
    const auto issue_products = [&](Scores& score, Scores& grad_weight, int stage) {
      attention::issue_scores<kSlice, kTile>(score, shared.a[buffers.index][warpgroup], shared.x[stage]);
      attention::issue_scores<kSlice, kTile>(grad_weight, shared.b[buffers.index][warpgroup], shared.y[stage]);
    };
    const auto issue_sums = [&](int stage) {
      attention::issue_output<kSlice, kTile>(dk, grad_score, shared.x[stage]);
      attention::issue_output<kSlice, kTile>(dv, weight, shared.y[stage]);
    };
    using PerQuery = OfQueries<kTile / 2>;
    const auto weigh_tile = [&](Scores& score, const PerQuery& lse, int tile) {
      const int query = unit.base + tile * kTile + lane.query;
      weigh(score, lse, scale, part.is_whole(tile), query, keys);
    };
    const auto differentiate_tile = [&](Scores& weights, Scores& grad, const PerQuery& delta, int tile, int64_t head) {
      uint64_t kept = 0;
      if constexpr (kDropout)
        kept = drop_gradients<true>(dropout, grad, head, first + lane.key, unit.base + tile * kTile + lane.query);
      differentiate(weights, grad, delta, part.is_whole(tile));
      if constexpr (kDropout) attention::AttentionDropout::drop(weights, kept);  // as v met them
    };
    const auto hand_over = [&] {  // gives grad_score to dq's warpgroup
      shared.scores_pipe.producer_acquire(handed);
      put_grad_score(grad_score, shared.grad_score[handed.index][warpgroup], lane.offset);
      __syncwarp();
      if (threadIdx.x % kWarpSize == 0) shared.scores_pipe.producer_commit(handed);
      handed.advance();
    };
    const auto hand_over_zeros = [&] {  // its keys are seen by none of the tile
      pingpong_wait();
      pingpong_arrive();
      if (leader) {
        shared.pipe.consumer_wait(ring);
        shared.pipe.consumer_release(ring.index);
      }
      __syncwarp();
      for (auto& of_16 : grad_score) {
        for (uint32_t& two : of_16) two = 0;
      }
      hand_over();
    };

    const int64_t first_head = kDropout ? (unit.batch * a.kv_heads + unit.head) * heads_together : 0;
    for (int i = 0; i < heads_together; ++i) {
      const int64_t head = first_head + i;
      int tile = unit.count - 1;
      if (tile >= part.seen) {
        {
          Scores score, grad;
          shared.pipe.consumer_wait(ring);
          pingpong_wait();
          wgmma_fence();
          issue_products(score, grad, ring.index);
          pingpong_arrive();
          free_stored();
          wgmma_wait<1>();
          const PerQuery lse(shared.lse[ring.index] + lane.query);
          weigh_tile(score, lse, tile);
          const PerQuery delta(shared.delta[ring.index] + lane.query);
          wgmma_wait<0>();
          differentiate_tile(score, grad, delta, tile, head);
          attention::pack_weights<T>(score, weight);
          attention::pack_weights<T>(grad, grad_score);
          hand_over();
        }
        const auto step = [&] {  // as in v4
          const int before = ring.index;
          ring.advance();
          Scores score, grad;
          shared.pipe.consumer_wait(ring);
          pingpong_wait();
          wgmma_fence();
          issue_products(score, grad, ring.index);
          issue_sums(before);
          pingpong_arrive();
          wgmma_wait<3>();
          const PerQuery lse(shared.lse[ring.index] + lane.query);
          weigh_tile(score, lse, tile);
          const PerQuery delta(shared.delta[ring.index] + lane.query);
          wgmma_wait<2>();
          differentiate_tile(score, grad, delta, tile, head);
          wgmma_wait<0>();
          if (leader) shared.pipe.consumer_release(before);
          attention::pack_weights<T>(score, weight);
          attention::pack_weights<T>(grad, grad_score);
          hand_over();
        };
        for (--tile; tile >= part.seen; --tile) step();
        wgmma_fence();
        issue_sums(ring.index);
        wgmma_wait<0>();
        if (leader) shared.pipe.consumer_release(ring.index);
        ring.advance();
      }
      for (; tile >= 0; --tile, ring.advance()) hand_over_zeros();
    }
    free_stored();  // where there was no product under which it could be done

    named_barrier_sync(1 + warpgroup, kWarpgroupSize);  // dk's last store has left its stage, as its leader knows
    const auto store = [&](const auto& sum, float factor, auto* tile, const CUtensorMap* map, void* to,
                           const Strides& stride) {
      const auto& of_unit = shared.unit[buffers.index];  // once more: registers are few
      store_of_keys<kPacked>(a, of_unit, first, sum, factor, keys.exists, tile, map, to, stride, 1 + warpgroup, leader);
    };
    store(dk, static_cast<float>(a.scale), shared.dk[warpgroup], &in.da, a.dk, a.dk_stride);
    store(dv, kDropout ? dropout.scale() : 1.0f, shared.b[buffers.index][warpgroup], &in.db, a.dv, a.dv_stride);
    stored = buffers.index;
  }
  if (warpgroup == 0) pingpong_wait();
  if (leader) tma_store_wait_read<0>();
}

// ---- dq's warpgroup ----

// A thread's four neighbours of a tile's sum, number i / 4 of 8, where it lies in memory: each warp's in one piece.
__device__ inline int lane_of_tile(int i) {
  return (i / 4 * kWarpgroupSize + static_cast<int>(threadIdx.x % kWarpgroupSize)) * 4;
}

// For each tile of queries: its sum over this block's keys, given to prepare(unit, head, row, sum, stage), with `head`
// of all heads of q, which puts it into its stage and returns what is to be done with it.
template <class B, class Prepare>
__device__ void sum_queries(const Args& a, B& shared, Prepare&& prepare) {
  const bool leader = leads_warpgroup(Five::kConsumers);
  const int heads_together = static_cast<int>(a.heads) / static_cast<int>(a.kv_heads);
  PipelineState<2> buffers, handed;
  PipelineState<Five::kSenders> sum_ring;
  // One lane arrives for its warp, and one thread frees the stage for all: compute-sanitizer's racecheck does not
  // follow that, and may report the stage's next use.
  const auto hand_over = [&](const Job& job) {
    if (leader) shared.job[sum_ring.index] = job;
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) shared.sums_pipe.producer_commit(sum_ring);
    sum_ring.advance();
  };
  for (;; buffers.advance()) {
    shared.own_pipe.consumer_wait(buffers);
    const auto unit = in_all_lanes(shared.unit[buffers.index]);
    if (unit.count < 0) break;
    const int first_head = (unit.batch * static_cast<int>(a.kv_heads) + unit.head) * heads_together;
    for (int head = first_head; head < first_head + heads_together; ++head) {
      for (int tile = unit.count - 1; tile >= 0; --tile, handed.advance()) {
        float sum[kSlice / 2];
        shared.scores_pipe.consumer_wait(handed);
        wgmma_fence();
        issue_dq(sum, shared.grad_score[handed.index], shared.a[buffers.index], 0);
        wgmma_wait<0>();
        if (leader) shared.scores_pipe.consumer_release(handed.index);
        shared.sums_pipe.producer_acquire(sum_ring);
        const auto& of_unit = shared.unit[buffers.index];
        hand_over(prepare(of_unit, head, unit.base + tile * Five::kTile, sum, shared.dq[sum_ring.index]));
      }
    }
    // Each warp for itself: they met in products, but one that lags has yet to read where its sum belongs.
    if (threadIdx.x % kWarpSize == 0) shared.own_pipe.consumer_release(buffers.index);
  }
  for (int i = 0; i < Five::kSenders; ++i) {
    shared.sums_pipe.producer_acquire(sum_ring);
    hand_over(Job{});
  }
}

// Puts a tile's sum into `stage`, from where a bulk copy may take it.
__device__ inline void put_sum(const float (&sum)[kSlice / 2], float* stage) {
#pragma unroll
  for (int i = 0; i < kSlice / 2; i += 4) {
    store_vector(stage + lane_of_tile(i), Vector<float, 4>{sum[i], sum[i + 1], sum[i + 2], sum[i + 3]});
  }
  tma_store_fence();
}

// Adds a tile's sum in memory to `sum`.
__device__ inline void add_sum(float (&sum)[kSlice / 2], const float* there) {
#pragma unroll
  for (int i = 0; i < kSlice / 2; i += 4) {
    const float4 four = __ldcg(reinterpret_cast<const float4*>(there + lane_of_tile(i)));  // as others left it: no L1
    sum[i] += four.x, sum[i + 1] += four.y, sum[i + 2] += four.z, sum[i + 3] += four.w;
  }
}

// ---- a thread that sends sums, those of its stage; of a packed row a warp ----

// Calls send(job) for each that is to be added. free() is to be called as soon as its stage may be written again.
// `column`: where its columns begin in dq.
template <bool kPacked, class B, class Send>
__device__ void send_sums(const Args& a, B& shared, const CUtensorMap* dq, int stage, int column, Send&& send) {
  using T = typename B::Element;
  const int lane = threadIdx.x % kWarpSize;
  if (!kPacked && lane != 0) return;
  for (int phase = 0;; phase ^= 1) {
    mbarrier_wait(&shared.sums_pipe.full[stage], phase);
    const Job job = shared.job[stage];
    if (job.kind == Job::kEnd) return;
    const auto free = [&] { shared.sums_pipe.consumer_release(stage); };
    if constexpr (kPacked) {
      const bool partly = job.kind == Job::kFinish && (job.begin > 0 || job.end < 64);
      if (partly) {
        const auto* const tile = reinterpret_cast<const T(*)[64 * kSlice]>(shared.dq[stage]);
        Rows<T> rows = rows_of_packed<T>(a.dq, a.dq_stride, job.head);
        rows.first += column;
        attention::copy_rows<1>(tile, job.begin, job.end, rows, job.row, a.head_dim - column, lane, kWarpSize);
      }
      __syncwarp();  // all have read the job, and the tile
      if (partly && lane == 0) free();
      if (partly || lane != 0) continue;
    }
    if (job.kind == Job::kAdd) {
      send(job, shared.dq[stage], free);
    } else {
      const int heads = static_cast<int>(a.heads);
      tma_store(dq, shared.dq[stage], column, job.row, job.head % heads, job.batch);
      tma_store_commit();
      tma_store_wait_read<0>();
      free();
    }
  }
}

// ---- a block ----

// Splits the block's threads. dq: its map, if `prepare` returns jobs of kFinish.
template <bool kDropout, bool kPacked, class B, class Prepare, class Send>
__device__ void run_five_products(const Args& a, const Queue& queue, B& shared, const Inputs& in, const CUtensorMap* dq,
                                  const PackedUnits& packed, Prepare&& prepare, Send&& send) {
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();
  const int warpgroup = warpgroup_of_block();
  if (warpgroup < Five::kConsumers) {
    warpgroup_reg_alloc<Five::kRegisters>();
    consume<kDropout, kPacked>(a, shared, in);
  } else if (warpgroup == Five::kConsumers) {
    warpgroup_reg_dealloc<Five::kSumRegisters>();
    sum_queries(a, shared, prepare);
  } else {
    warpgroup_reg_dealloc<Five::kProducerRegisters>();
    const int warp = warp_uniform(static_cast<int>(threadIdx.x / kWarpSize)) - (Five::kConsumers + 1) * 4;
    if (warp == 0) produce<Five, kPacked>(a, queue, shared, in, packed);
    if (warp > 0 && warp <= Five::kSenders) {
      send_sums<kPacked>(a, shared, dq, warp - 1, 0, send);
    }
  }
}

// ---- on the host, and sizes ----

inline int64_t tiles_of(const Args& a) { return a.batch * a.heads * tiles_of_queries(a); }
inline int64_t sum_bytes(const Args& a) { return tiles_of(a) * kTileFloats * int64_t{sizeof(float)}; }

// Tiles of keys, heads in groups. Two of a head's tiles, or a few, are then at work at the same time, and what a group
// reads and adds to stays in the L2 cache. Measured on an H200: half as many rows are up to 18 % slower, twice as many
// up to 5 %.
inline Queue queue_of_keys(const Args& a, unsigned* counter) {
  const int64_t heads = a.batch * a.kv_heads;
  const int64_t tiles = a.cu_seqlens == nullptr ? ceil_div(a.k_length, Five::kOwned) : PackedUnits::most(a);
  return {counter, static_cast<unsigned>(tiles), static_cast<unsigned>(heads),
          static_cast<unsigned>(std::clamp<int64_t>(65536 / a.k_length, 1, heads)), false};
}
inline unsigned blocks_of_queue(const Queue& queue) {
  return static_cast<unsigned>(std::min(int64_t{queue.tiles} * queue.heads, multiprocessors()));
}

template <class T>
CUtensorMap map_of_dq(const Args& a) {
  return attention::map_of<T>(a, a.dq, a.dq_stride, a.heads, a.q_length, Five::kTile);
}

}  // namespace kf::KF_BACKEND::attention_backward
