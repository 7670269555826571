// attention v8_persistent: blocks stay, and the next queries are there before these are done
//
// Idea      v7's blocks each begin with a wait and end with a store, and the last ones leave multiprocessors idle. Here
//           a block for each multiprocessor stays until all is done: its producer runs ahead into the next tile of
//           queries, which has a second stage, and an output leaves by TMA under the next tile's first product.
// Since v7  A loop over tiles of queries, in an order that gives all blocks the same work (schedule.h). The
//           producer works out which tile is next and hands it on beside the queries: it has the time, and a
//           consumer's instructions are what the tensor cores wait for. Consumers exchange their rows from one tile
//           of queries to the next: under a causal mask the last rows cost most. Up to D 64: four consumers and 64 keys
//           a tile, without turns, since four fill each other's gaps. Of a packed row, without dropout, each document
//           has tiles of its own (schedule.h).
//           producer      Q0 K V K V K V Q1 K V K V K V Q2 …
//           consumers          tile 0      │      tile 1     │ …
//           store                          └ output of tile 0, under tile 1's first product
// Launch    grid min(tiles, multiprocessors). P = 64 columns (D ≤ 64): block 640, 4 consumers, Q = 256, 64 keys a tile,
//           8 stages, 192 KB of shared memory; P = 128: block 384, 2 consumers, Q = 128, 128 keys, 2 stages, 192 KB
// Roles     the last warpgroup: one warp, the producer, 32 registers (P = 128: 40). The others: 64 queries, 112 (232)
// Barriers  q_pipe.full, k_pipe.full, v_pipe.full: 1 arrival and the bytes (q_pipe.full at the end: 1, there are no
//           more); q_pipe.empty, k_pipe.empty, v_pipe.empty: 4 (2), the consumers' leaders'. v_raw as in v7. Named:
//           turns as in v7 (P = 128 only); an output is written, 128
// A stage   of K and V as in v7. Of Q: empty ─ producer_acquire ─ TMA ─ full ─ all scores of a tile ─ the output is
//           written in its place ─ TMA stores it, under the next tile's first product ─ consumer_release ─ empty
// Moves     B·H·((2·Sq + 2·Sk·⌈Sq/Q⌉)·D·2 + 4·Sq) bytes, most of K and V from the L2 cache;
//           4·B·H·Sq·Sk·P FLOPs (causal: half at Sq = Sk), B·H·Sq·Sk exponentials
// Limits    as v7_warpgroups, but for the waits. With fewer tiles than multiprocessors some stay idle. Packed rows take
//           14 KB more, for the tiles' order, with dropout 18. Like v3 it rounds the weights
#include <step2/attention/hopper.h>

#include <algorithm>

#include "rungs.h"
#include "schedule.h"

namespace kf::KF_BACKEND::attention {
namespace {

template <int kColumns>
struct Shape {
  static constexpr int kConsumers = kColumns == 64 ? 4 : 2;      // warpgroups
  static constexpr int kQueries = kConsumers * 64;               // of a tile
  static constexpr int kKeys = kColumns == 64 ? 64 : 128;        // of a tile
  static constexpr int kStages = kColumns == 64 ? 8 : 2;         // for tiles of K, and as many for V
  static constexpr int kRegisters = kColumns == 64 ? 112 : 232;  // of a consumer
  static constexpr int kProducerRegisters = kColumns == 64 ? 32 : 40;
  static constexpr bool kPingpong = kColumns != 64;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupSize;
};

template <bool kPacked, int kColumns, class T>
struct SharedTiles {
  using S = Shape<kColumns>;
  T q[2][S::kConsumers][kColumns / kSlice][64 * kSlice];
  T k[S::kStages][kColumns / kSlice][S::kKeys * kSlice];
  T v[S::kStages][kColumns / kSlice][S::kKeys * kSlice];
  Pipeline<2> q_pipe;
  Pipeline<S::kStages> k_pipe, v_pipe;
  uint64_t v_raw;
  Announced<Queries<kPacked>> announced[2];  // whose queries lie in q
};

// Of packed rows: what the announced queries see, where tiles straddle documents, and the order of the tiles.
// kApart: the row is packed, and documents have tiles of their own. kPacked: tiles straddle them.
template <bool kPacked, bool kApart, int kColumns, class T>
struct Shared : WithSeen<kPacked, SharedTiles<kPacked, kColumns, T>, Shape<kColumns>::kQueries, 2>,
                SortedTiles<kPacked || kApart> {};

template <int kColumns, class Block>
__device__ int tiles_of_keys(const Block& block) {
  constexpr int kKeys = Shape<kColumns>::kKeys;
  return max(block.seen_by(Shape<kColumns>::kQueries - 1) + kKeys - 1, 0) / kKeys;
}

// One warp of the producer.
template <bool kDropout, bool kPacked, bool kApart, int kColumns, class T>
__device__ void produce(const Args& a, Order order, const PackedPart& packed,
                        Shared<kPacked, kApart, kColumns, T>& shared, const Maps& maps) {
  constexpr int kSlices = kColumns / kSlice, kKeys = Shape<kColumns>::kKeys, kQueries = Shape<kColumns>::kQueries;
  const bool leader = threadIdx.x % kWarpSize == 0;
  PipelineState<2> q_ring;
  PipelineState<Shape<kColumns>::kStages> ring;
  int raw_phase = 0;
  Queries<kPacked> block;
  auto work = [&] {
    if constexpr (kPacked || kApart) return PackedWork(a, shared, packed);
    if constexpr (!kPacked && !kApart) return Work<kQueries>(a, order);
  }();
  for (; work.find(a, block); work.next(), q_ring.advance()) {
    if constexpr (kPacked) {
      if (leader) shared.q_pipe.producer_acquire(q_ring);
      __syncwarp();
      block = queries_of_warp<kDropout>(a, block.head, block.first, shared.seen[q_ring.index]);
    }
    const Head head(a, block.head);
    if (leader) {
      uint64_t* const full = &shared.q_pipe.full[q_ring.index];
      if constexpr (!kPacked) shared.q_pipe.producer_acquire(q_ring);
      shared.announced[q_ring.index] = {block, head.head, head.batch};
      mbarrier_arrive_expect_tx(full, sizeof shared.q[0]);
      for (int w = 0; w < Shape<kColumns>::kConsumers; ++w) {
        load_slices<kSlices, 64>(shared.q[q_ring.index][w], &maps.q, full, block.first + w * 64, head.head, head.batch);
      }
    }
    for (int j = tiles_of_keys<kColumns>(block) - 1; j >= 0; --j, ring.advance()) {
      const int stage = ring.index;
      const int key = block.first_key + j * kKeys;
      const int keys = block.keys - j * kKeys;  // in the tile, or more
      if (leader) {
        shared.k_pipe.producer_acquire(ring, sizeof shared.k[stage]);
        load_slices<kSlices, kKeys>(shared.k[stage], &maps.k, &shared.k_pipe.full[stage], key, head.kv_head,
                                    head.batch);
        shared.v_pipe.producer_acquire(ring);
        uint64_t* const full = keys < kKeys ? &shared.v_raw : &shared.v_pipe.full[stage];
        mbarrier_arrive_expect_tx(full, sizeof shared.v[stage]);
        load_slices<kSlices, kKeys>(shared.v[stage], &maps.v, full, key, head.kv_head, head.batch);
      }
      if (keys < kKeys) {  // the first tile only: what lies beyond the keys must become 0 before anyone reads it
        mbarrier_wait(&shared.v_raw, raw_phase);
        raw_phase ^= 1;
        clear_rows<kSlices, kKeys>(shared.v[stage], keys, threadIdx.x % kWarpSize, kWarpSize);
        tma_store_fence();
        __syncwarp();
        if (leader) shared.v_pipe.producer_commit(ring);
      }
    }
  }
  if (leader) {
    shared.q_pipe.producer_acquire(q_ring);
    shared.announced[q_ring.index].block.head = -1;
    shared.q_pipe.producer_commit(q_ring);
  }
}

template <bool kDropout, bool kPacked, bool kApart, int kColumns, class T>
__device__ void consume(const Args& a, Shared<kPacked, kApart, kColumns, T>& shared, const Maps& maps) {
  using S = Shape<kColumns>;
  constexpr int kKeys = S::kKeys;
  const int warpgroup = warpgroup_of_block();
  const bool leader = leads_warpgroup(warpgroup);
  const float scale = static_cast<float>(a.scale * kLog2e);
  const auto pingpong_wait = [&] {
    if constexpr (S::kPingpong) named_barrier_sync(1 + warpgroup, 2 * kWarpgroupSize);
  };
  const auto pingpong_arrive = [&] {
    if constexpr (S::kPingpong) named_barrier_arrive(1 + (warpgroup + 1) % S::kConsumers, 2 * kWarpgroupSize);
  };
  if (S::kPingpong && warpgroup == 0) named_barrier_arrive(1, 2 * kWarpgroupSize);  // the first turn

  PipelineState<2> q_ring;
  PipelineState<S::kStages> ring;
  int stored = -1;                // the stage of q from which this warpgroup's last output is being stored
  const auto free_stored = [&] {  // once the store has read it
    if (leader && stored >= 0) {
      tma_store_wait_read<0>();
      shared.q_pipe.consumer_release(stored);
    }
    stored = -1;
  };
  for (;; q_ring.advance()) {
    shared.q_pipe.consumer_wait(q_ring);
    const auto& announced = shared.announced[q_ring.index];
    Queries<kPacked> block = in_all_lanes(announced.block);
    if constexpr (kPacked) block.rows = shared.seen[q_ring.index];
    if (block.head < 0) break;
    const int part = q_ring.index == 0 ? warpgroup : S::kConsumers - 1 - warpgroup;  // of the tile's rows
    const int first_row = part * 64;
    auto& q = shared.q[q_ring.index][part];

    RowsSoftmax softmax;
    AttentionDropout dropout(a);
    float out[kColumns / 2] = {};
    float factor[2];
    uint32_t weight[kKeys / 16][4];

    int j = tiles_of_keys<kColumns>(block) - 1;
    const auto skip = [&] {
      pingpong_wait();
      pingpong_arrive();
      skip_tile(shared, ring, leader);
    };
    const int lowest = lowest_tile<kKeys>(block, first_row);
    const int seen = first_row < block.queries ? block.seen_by(first_row + 63) : 0;
    for (; j >= lowest && j * kKeys >= seen; --j, ring.advance()) skip();  // its queries see none of these
    if (j >= lowest) {
      {
        float score[kKeys / 2];
        shared.k_pipe.consumer_wait(ring);
        pingpong_wait();
        wgmma_fence();
        issue_scores<kColumns, kKeys>(score, q, shared.k[ring.index]);
        pingpong_arrive();
        free_stored();
        wgmma_wait<0>();
        if (leader) shared.k_pipe.consumer_release(ring.index);
        mask_scores(score, block, first_row, j * kKeys);
        softmax.weigh(score, scale, factor);  // the factor meets an output of zeros
        if constexpr (kDropout) drop_weights(dropout, score, block, first_row, j * kKeys);
        pack_weights<T>(score, weight);
      }
      // Both products at once, and the softmax while they run.
      const auto step = [&](auto masked) {
        const PipelineState<S::kStages> before = ring;
        ring.advance();
        float score[kKeys / 2];
        // Both tiles first: a wait between the products would make the compiler put them one after the other.
        shared.v_pipe.consumer_wait(before);
        shared.k_pipe.consumer_wait(ring);
        pingpong_wait();
        wgmma_fence();
        issue_scores<kColumns, kKeys>(score, q, shared.k[ring.index]);
        issue_output<kColumns, kKeys>(out, weight, shared.v[before.index]);
        pingpong_arrive();
        wgmma_wait<1>();  // the scores
        if (leader) shared.k_pipe.consumer_release(ring.index);
        if constexpr (decltype(masked)::value) mask_scores(score, block, first_row, j * kKeys);
        const bool raised = softmax.weigh(score, scale, factor);
        wgmma_wait<0>();  // the output: the weights' registers are free, and the factor may be applied
        if (leader) shared.v_pipe.consumer_release(before.index);
        if (raised) {
#pragma unroll
          for (int i = 0; i < kColumns / 2; ++i) out[i] *= factor[i / 2 % 2];
        }
        if constexpr (kDropout) drop_weights(dropout, score, block, first_row, j * kKeys);
        pack_weights<T>(score, weight);
      };
      // Only the first tiles meet the mask; without it the loop is one piece, in which the compiler may move things.
      const int all_see = block.seen_by(first_row);  // its first query sees the least
      for (--j; j >= lowest && (j + 1) * kKeys > all_see; --j) step(std::true_type{});
      for (const int to = lowest_tile_for_all<kKeys>(block, first_row); j >= to; --j) step(std::false_type{});
      for (; kPacked && j >= lowest; --j) step(std::true_type{});
      shared.v_pipe.consumer_wait(ring);
      wgmma_fence();
      issue_output<kColumns, kKeys>(out, weight, shared.v[ring.index]);
      wgmma_wait<0>();
      if (leader) shared.v_pipe.consumer_release(ring.index);
      ring.advance();
    }
    for (; kPacked && j >= 0; --j, ring.advance()) skip();  // of documents before its own
    free_stored();                                          // where there was no product under which it could be done

    store_rows<kDropout, kApart>(a, block, first_row, softmax, out, q, &maps.out, warp_uniform(announced.head),
                                 warp_uniform(announced.batch), 1 + S::kConsumers + warpgroup, leader,
                                 kDropout ? dropout.scale() : 1.0f);
    stored = q_ring.index;
  }
  if (warpgroup == 0) pingpong_wait();  // which the last one has passed on; barriers end as they began
  if (leader) tma_store_wait_read<0>();
}

template <bool kPacked, bool kApart, int kColumns, bool kDropout, class T>
__global__ void __launch_bounds__(Shape<kColumns>::kThreads, 1)
    v8_persistent_kernel(Args a, const __grid_constant__ Maps maps, Order order, PackedPart packed) {
  using S = Shape<kColumns>;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<kPacked, kApart, kColumns, T>*>(memory);
  if (threadIdx.x == 0) {
    mbarrier_init(&shared.v_raw, 1);
    shared.q_pipe.init(S::kConsumers);
    shared.k_pipe.init(S::kConsumers);
    shared.v_pipe.init(S::kConsumers);
    mbarrier_init_fence();
  }
  shared.template sort<S::kQueries, kApart>(a, packed);
  __syncthreads();

  if (warpgroup_of_block() == S::kConsumers) {
    warpgroup_reg_dealloc<S::kProducerRegisters>();
    if (threadIdx.x / kWarpSize == S::kConsumers * 4) produce<kDropout>(a, order, packed, shared, maps);
  } else {
    warpgroup_reg_alloc<S::kRegisters>();
    consume<kDropout>(a, shared, maps);
  }
}

}  // namespace

std::string v8_persistent_can_implement(const Args& a) {
  return on_hopper(a, a.head_dim <= 64 ? Shape<64>::kQueries : Shape<128>::kQueries);
}

void v8_persistent(const Args& a, void* stream) {
  with_slices_and_documents(a, [&](auto type, auto columns, auto drops, auto packed) {
    using T = typename decltype(type)::element;
    using S = Shape<columns.value>;
    // Dropout's numbers are of 16 rows by 32 keys, counted from the row's beginning: there tiles lie as in any row.
    constexpr bool kApart = packed.value && !drops.value, kStraddle = packed.value && drops.value;
    constexpr int kBytes = sizeof(Shared<kStraddle, kApart, columns.value, T>);
    const auto kernel = v8_persistent_kernel<kStraddle, kApart, columns.value, drops.value, T>;
    allow_shared(kernel, kBytes);
    const auto maps = maps_of<T>(a, S::kKeys);
    const auto run = [&](int64_t tiles, const PackedPart& part) {
      const int64_t blocks = std::min(a.batch * a.heads * tiles, multiprocessors());
      kernel<<<static_cast<unsigned>(blocks), S::kThreads, kBytes, as_stream(stream)>>>(
          a, maps, order_of(a, tiles, blocks), part);
      check_launch();
    };
    in_parts<packed.value>(a, kApart ? slots_of(a, a.q_length, S::kQueries) : ceil_div(a.q_length, S::kQueries), run);
  });
}

}  // namespace kf::KF_BACKEND::attention
