// attention_backward v5_persistent: blocks stay, and the next rows arrive while these are worked on
//
// Idea      At GPT-2's lengths a block of v4 lives for some ten microseconds. It begins with a wait for its first tiles
//           and ends with its sums, and nothing runs beside it. Here as many blocks as multiprocessors stay until all
//           is done. They take rows from a queue, a counter in memory, and the producer asks early: own rows have two
//           buffers, so that the next ones arrive while these are worked on, and sums are stored under the next
//           products. Under the causal mask rows differ in work. Of a group of heads those with the most are taken
//           first, and who is done takes the next: little is left at the end. What a group reads stays in the L2 cache.
// Since v4  Persistent blocks, a queue, own rows twice. Where keys are owned and D ≤ 64, k and v go into registers
//           once, as operand a, and are not read from shared memory again for each tile.
// Launch    Δ and lse as v4, and two counters beside them. Then two grids of as many blocks as multiprocessors, or as
//           v4 has where these are fewer; blocks as v4's. P = 64 columns (D ≤ 64): 162 KB of shared memory, and
//           130 KB. P = 128: 226 KB, 3 tiles in the ring, and 193 KB
// Roles     the last warpgroup: one warp is the producer. The others are consumers of 64 own rows each: 2, or 3 where
//           queries of D ≤ 64 are owned
// Barriers  own_pipe.full and pipe.full: 1 arrival and the bytes (own_pipe.full at the end: 1, there are no more);
//           own_pipe.empty and pipe.empty: 2 or 3, the consumers' leaders'. raw: 1 and the bytes of a tile with
//           padding, which the producer then clears; pipe.full gets 1 and no bytes. Named, 128, of each consumer: its
//           sums are written
// A stage   of the ring: empty ─ producer_acquire ─ TMA ─ full ─ scores ─ the sums' products, issued with the next
//           scores ─ consumer_release by all ─ empty. Of own rows: … full ─ all products ─ sums are written in their
//           place ─ TMA stores them, under the next rows' first products ─ consumer_release ─ empty
// Moves     B·H·((5·Sq + 2·Sk·⌈Sq/Q⌉ + 2·Sq·⌈Sk/128⌉)·D·2) + 8·B·Hkv·Sk·D bytes, most of what is walked over from
//           the L2 cache; 14·B·H·Sq·Sk·P FLOPs (causal: half at Sq = Sk), 2·B·H·Sq·Sk exponentials
// Limits    float16, bfloat16; D ≤ 128, a multiple of 8; compute capability 9.0. A tile a multiprocessor,
//           or less, is no faster than in v4: there is no next one. Beyond D 64 operand a is read from shared memory
//           for each tile. Scratch of 8·B·H·(Sq + 67) + 8 bytes at most. It rounds the weights and their gradients
#include <algorithm>

#include "delta.h"
#include "hopper.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_backward {
namespace {

constexpr unsigned kHeadsTogether = 16;  // in a group. Measured on an H200: 32 or all are up to 5 % slower at S 4096

template <class S, bool kOwnsKeys, class T>
__device__ void produce(const Args& a, const Queue& queue, Shared<S, T>& shared, const Inputs& in) {
  const bool leader = threadIdx.x % kWarpSize == 0;
  Producer<S, kOwnsKeys, T> producer{a, shared, in};
  PipelineState<2> buffers;
  for (;; buffers.advance()) {
    int number = 0;
    if (leader) {
      shared.own_pipe.producer_acquire(buffers);
      const unsigned next = atomicAdd(queue.next, 1u);
      number = next < queue.tiles * queue.heads ? static_cast<int>(next) : -1;
      shared.announced[buffers.index] = number;
    }
    number = warp_uniform(number);
    if (number < 0) break;
    const Role<kOwnsKeys, T> role(a, queue.tile(number), S::kOwned);
    if (leader) producer.load_own(role, buffers.index);
    producer.load_walked(role, Walk<kOwnsKeys, S::kTile>(role));
  }
  if (leader) shared.own_pipe.producer_commit(buffers);
}

template <class S, bool kOwnsKeys, int kColumns, bool kDropout, class T>
__device__ void consume(const Args& a, const Queue& queue, Shared<S, T>& shared, const Inputs& in) {
  constexpr int kTile = S::kTile;
  constexpr bool kInRegisters = kOwnsKeys && kColumns == kSlice;  // k and v; with q and grad 3 consumers find no room
  using Scores = float[kTile / 2];                                // a lane's, against a tile
  constexpr int kSums = kOwnsKeys ? 2 : 1;                        // groups of products of the tile before
  const int warpgroup = warpgroup_of_block();
  const bool leader = leads_warpgroup(warpgroup);
  const int lane = threadIdx.x % kWarpSize;
  const int column = lane % 4 * 2;  // of score[0]
  const float scale = static_cast<float>(a.scale * kLog2e);

  attention::AttentionDropout dropout(a);
  PipelineState<2> buffers;
  PipelineState<S::kStages> ring;
  static_assert((S::kConsumers - 1) * 64 / kTile < S::kStages);  // as in v4
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
    const int number = warp_uniform(shared.announced[buffers.index]);
    if (number < 0) break;
    const Role<kOwnsKeys, T> role(a, queue.tile(number), S::kOwned);
    const Walk<kOwnsKeys, kTile> walk(role);
    const int64_t first_own = role.first + warpgroup * 64;
    auto& own_a = shared.a[buffers.index][warpgroup];
    auto& own_b = shared.b[buffers.index][warpgroup];

    // This lane's two rows.
    const int64_t own_row = first_own + threadIdx.x / kWarpSize % 4 * 16 + lane / 4;
    int begin[2], end[2];
    bool exists[2];
    float own_lse[2] = {INFINITY, INFINITY}, own_delta[2] = {};
    for (int r = 0; r < 2; ++r) {
      const int64_t own = own_row + 8 * r;
      const Range pairs = role.partners_of(own);
      begin[r] = static_cast<int>(pairs.begin), end[r] = static_cast<int>(pairs.end);
      exists[r] = role.exists(own);
      if (kOwnsKeys || !exists[r]) continue;
      own_lse[r] = in.lse[role.head * in.length + own];
      own_delta[r] = in.delta[role.head * in.length + own];
    }
    uint32_t a_operand[4][4], b_operand[4][4];
    if constexpr (kInRegisters) {
      load_operand(a_operand, own_a[0]);
      load_operand(b_operand, own_b[0]);
    }

    // Of the warpgroup's rows that exist, the pairs of the one with the most, and of the one with the least.
    const int64_t first_row = max(first_own, role.exist.begin), last_row = min(first_own + 64, role.exist.end) - 1;
    const Range none{0, 0};
    const Range most = first_row > last_row ? none : role.partners_of(kOwnsKeys ? first_row : last_row);
    const Range least = first_row > last_row ? none : role.partners_of(kOwnsKeys ? last_row : first_row);
    const int first_tile = walk.first_seen(most), first_whole = walk.first_whole(least);

    float da[kColumns / 2] = {}, db[kOwnsKeys ? kColumns / 2 : 1] = {};
    uint32_t weight[kTile / 16][4], grad_score[kTile / 16][4];
    const auto issue_products = [&](Scores& score, Scores& grad_weight, int stage) {
      if constexpr (kInRegisters) {
        attention::issue_scores<kColumns, kTile>(score, a_operand, shared.x[stage]);
        attention::issue_scores<kColumns, kTile>(grad_weight, b_operand, shared.y[stage]);
      } else {
        attention::issue_scores<kColumns, kTile>(score, own_a, shared.x[stage]);
        attention::issue_scores<kColumns, kTile>(grad_weight, own_b, shared.y[stage]);
      }
    };
    const auto issue_sums = [&](int stage) {
      attention::issue_output<kColumns, kTile>(da, grad_score, shared.x[stage]);
      if constexpr (kOwnsKeys) attention::issue_output<kColumns, kTile>(db, weight, shared.y[stage]);
    };
    // What is subtracted from score[i] and score[i + 1]: of the two queries walked over, or of the lane's own.
    const auto of_queries = [&](const float (&walked)[kTile], const float (&own)[2], int i) {
      if constexpr (kOwnsKeys) return load_vector<2>(walked + i / 4 * 8 + column);
      return Vector<float, 2>{own[i / 2 % 2], own[i / 2 % 2]};
    };
    const auto weigh = [&](Scores& score, int stage, int tile) {
#pragma unroll
      for (int i = 0; i < kTile / 2; i += 2) {
        const Vector<float, 2> lse = of_queries(shared.lse[stage], own_lse, i);
        for (int j = 0; j < 2; ++j) score[i + j] = exp2_approx(score[i + j] * scale - lse.element[j]);
      }
      if (tile >= first_whole) return;
      const int first = walk.row(tile) + column;
#pragma unroll
      for (int i = 0; i < kTile / 2; ++i) {
        const int at = first + i / 4 * 8 + i % 2, r = i / 2 % 2;
        if (at < begin[r] || at >= end[r]) score[i] = 0.0f;
      }
    };
    const auto differentiate = [&](Scores& weights, Scores& grad, int stage, int tile, int64_t head) {
      uint64_t kept = 0;
      if constexpr (kDropout) kept = drop_gradients<kOwnsKeys>(dropout, grad, head, own_row, walk.row(tile) + column);
#pragma unroll
      for (int i = 0; i < kTile / 2; i += 2) {
        const Vector<float, 2> delta = of_queries(shared.delta[stage], own_delta, i);
        for (int j = 0; j < 2; ++j) grad[i + j] = weights[i + j] * (grad[i + j] - delta.element[j]);
      }
      if (tile < first_whole) {
#pragma unroll
        for (int i = 0; i < kTile / 2; ++i) {
          if (weights[i] == 0.0f) grad[i] = 0.0f;  // where v is padding, grad may be NaN
        }
      }
      if constexpr (kDropout && kOwnsKeys) attention::AttentionDropout::drop(weights, kept);  // as v met them
    };

    for (int64_t head = role.first_head(); head < role.end_head(); ++head) {
      int tile = 0;
      for (; tile < first_tile; ++tile, ring.advance()) {  // its rows see none of these
        if (leader) {
          shared.pipe.consumer_wait(ring);
          shared.pipe.consumer_release(ring.index);
        }
      }
      __syncwarp();
      if (tile == walk.count) continue;
      {
        Scores score, grad;
        shared.pipe.consumer_wait(ring);
        wgmma_fence();
        issue_products(score, grad, ring.index);
        free_stored();
        wgmma_wait<1>();
        weigh(score, ring.index, tile);
        wgmma_wait<0>();
        differentiate(score, grad, ring.index, tile, head);
        if constexpr (kOwnsKeys) attention::pack_weights<T>(score, weight);
        attention::pack_weights<T>(grad, grad_score);
      }
      const auto step = [&] {  // as in v4
        const int before = ring.index;
        ring.advance();
        Scores score, grad;
        shared.pipe.consumer_wait(ring);
        wgmma_fence();
        issue_products(score, grad, ring.index);
        issue_sums(before);
        wgmma_wait<1 + kSums>();
        weigh(score, ring.index, tile);
        wgmma_wait<kSums>();
        differentiate(score, grad, ring.index, tile, head);
        wgmma_wait<0>();
        if (leader) shared.pipe.consumer_release(before);
        if constexpr (kOwnsKeys) attention::pack_weights<T>(score, weight);
        attention::pack_weights<T>(grad, grad_score);
      };
      for (++tile; tile < walk.count; ++tile) step();
      wgmma_fence();
      issue_sums(ring.index);
      wgmma_wait<0>();
      if (leader) shared.pipe.consumer_release(ring.index);
      ring.advance();
    }
    free_stored();  // where there was no product under which it could be done

    const auto store = [&](const auto& sum, float factor, T(*tile)[64 * kSlice], const CUtensorMap* map) {
      store_gradient(sum, factor, exists, tile, map, static_cast<int>(first_own), role.head_of_batch(), role.batch(),
                     1 + warpgroup, leader);
    };
    store(da, static_cast<float>(a.scale), own_a, &in.da);
    if constexpr (kOwnsKeys) store(db, kDropout ? dropout.scale() : 1.0f, own_b, &in.db);
    stored = buffers.index;
  }
  if (leader) tma_store_wait_read<0>();
}

template <bool kOwnsKeys, int kColumns, bool kDropout, class T>
__global__ void __launch_bounds__(Shape<kOwnsKeys, kColumns, 2>::kThreads, 1)
    v5_persistent_kernel(Args a, const __grid_constant__ Inputs in, Queue queue) {
  using S = Shape<kOwnsKeys, kColumns, 2>;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<S, T>*>(memory);
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();

  if (warpgroup_of_block() == S::kConsumers) {
    warpgroup_reg_dealloc<S::kProducerRegisters>();
    if (threadIdx.x / kWarpSize == S::kConsumers * 4) produce<S, kOwnsKeys>(a, queue, shared, in);
  } else {
    warpgroup_reg_alloc<S::kRegisters>();
    consume<S, kOwnsKeys, kColumns, kDropout>(a, queue, shared, in);
  }
}

template <bool kOwnsKeys, int kColumns, bool kDropout, class T>
void launch(const Args& a, const float* lse, const float* delta, unsigned* counter, void* stream) {
  using S = Shape<kOwnsKeys, kColumns, 2>;
  using R = Role<kOwnsKeys, T>;
  const auto in = inputs_of<kOwnsKeys, S::kTile, T>(a, lse, delta);
  constexpr int kBytes = sizeof(Shared<S, T>);
  allow_shared(v5_persistent_kernel<kOwnsKeys, kColumns, kDropout, T>, kBytes);
  const int64_t tiles = ceil_div(R::length(a), S::kOwned);
  const Queue queue{counter, static_cast<unsigned>(tiles), static_cast<unsigned>(R::heads(a)), kHeadsTogether,
                    a.causal && !kOwnsKeys};
  const auto blocks = static_cast<unsigned>(std::min(tiles * R::heads(a), multiprocessors()));
  v5_persistent_kernel<kOwnsKeys, kColumns, kDropout, T>
      <<<blocks, S::kThreads, kBytes, as_stream(stream)>>>(a, in, queue);
  check_launch();
}

}  // namespace

std::string v5_persistent_can_implement(const Args& a) { return v4_warpgroups_can_implement(a); }

int64_t v5_persistent_scratch_bytes(const Args& a) {
  return v4_warpgroups_scratch_bytes(a) + 2 * static_cast<int64_t>(sizeof(unsigned));
}

void v5_persistent(const Args& a, void* stream) {
  attention::with_slices(a, [&](auto type, auto columns, auto drops) {
    using T = typename decltype(type)::element;
    const Scratch scratch(a, a.scratch);
    launch_delta<8, T>(a, scratch.delta, scratch.lse, padded_length(a), scratch.counter, stream);
    launch<false, columns.value, drops.value, T>(a, scratch.lse, scratch.delta, scratch.counter, stream);
    launch<true, columns.value, drops.value, T>(a, scratch.lse, scratch.delta, scratch.counter + 1, stream);
  });
}

}  // namespace kf::KF_BACKEND::attention_backward
