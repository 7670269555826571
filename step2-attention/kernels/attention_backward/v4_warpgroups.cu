// attention_backward v4_warpgroups: a warpgroup loads, the others overlap products and gradients
//
// Idea      What attention's v6 and v7 do, in both roles. TMA brings tiles into a ring, wgmma reads them from there.
//           A consumer, a warpgroup with 64 rows of its own, issues both products of the next tile together with the
//           sums of this one, and computes weights and gradients while they run:
//
//             tensor cores   a·x b·y of tile 1 │ sums of tile 0 │ a·x b·y of tile 2 │ sums of tile 1 │
//             consumer                         │ weights, gradients of tile 1       │ … of tile 2
//
//           Weights and gradients go from one product's registers into the next one's: no score is ever stored.
// Since v3  64 rows a warpgroup instead of 16 a warp; fragments are not loaded any more. Tiles that meet the mask come
//           first, the others are not compared with it; a warpgroup leaves out tiles that none of its rows is paired
//           with. lse, in base 2, and Δ are written once with room behind each head's last query, +∞ and 0 there: where
//           queries are walked over they are copied beside them.
// Launch    Δ and lse: grid (⌈(4·⌈Sq/4⌉ + 64)/128⌉, B·H), block 8×32. Then grid B·H·⌈Sq/Q⌉ and grid
//           B·Hkv·⌈Sk/128⌉, a producer and consumers of 128 threads each. P = 64 columns (D ≤ 64): Q = 192,
//           3 consumers, 114 KB of shared memory, and 2 consumers, 98 KB. P = 128: Q = 128, 2 consumers, 194 KB, and
//           2 consumers, 129 KB. 4 tiles in the ring, of 64 rows; of 32 where keys are owned at P 128
// Moves     B·H·((5·Sq + 2·Sk·⌈Sq/Q⌉ + 2·Sq·⌈Sk/128⌉)·D·2) + 8·B·Hkv·Sk·D bytes, most of what is walked over from the
//           L2 cache; 14·B·H·Sq·Sk·P FLOPs (causal: half at Sq = Sk), 2·B·H·Sq·Sk exponentials
// Limits    As v3_mma, but compute capability 9.0. A block begins with a wait for its first tiles and ends with its
//           sums, and nothing runs beside it. Operand a is read from shared memory again for each tile. Scratch of
//           8·B·H·(Sq + 67) bytes at most. It rounds the weights and their gradients
#include "delta.h"
#include "hopper.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_backward {
namespace {

template <class S, bool kDropout, bool kOwnsKeys, class T, class Walk>
__device__ void consume(const Args& a, const Role<kOwnsKeys, T>& role, const Walk& walk, Shared<S, T>& shared,
                        const Inputs& in) {
  constexpr int kColumns = S::kSlices * kSlice, kTile = S::kTile;
  using Scores = float[kTile / 2];          // a lane's, against a tile
  constexpr int kSums = kOwnsKeys ? 2 : 1;  // groups of products of the tile before
  const int warpgroup = warpgroup_of_block();
  const bool leader = leads_warpgroup(warpgroup);
  const int lane = threadIdx.x % kWarpSize;
  const int64_t first_own = role.first + warpgroup * 64;
  const float scale = static_cast<float>(a.scale * kLog2e);

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

  // Of the warpgroup's rows that exist, the pairs of the one with the most, and of the one with the least.
  const int64_t first_row = max(first_own, role.exist.begin), last_row = min(first_own + 64, role.exist.end) - 1;
  const Range none{0, 0};
  const Range most = first_row > last_row ? none : role.partners_of(kOwnsKeys ? first_row : last_row);
  const Range least = first_row > last_row ? none : role.partners_of(kOwnsKeys ? last_row : first_row);
  const int first_tile = walk.first_seen(most), first_whole = walk.first_whole(least);

  attention::AttentionDropout dropout(a);
  float da[kColumns / 2] = {}, db[kOwnsKeys ? kColumns / 2 : 1] = {};
  uint32_t weight[kTile / 16][4], grad_score[kTile / 16][4];
  const auto issue_products = [&](Scores& score, Scores& grad_weight, int stage) {
    attention::issue_scores<kColumns, kTile>(score, shared.a[0][warpgroup], shared.x[stage]);
    attention::issue_scores<kColumns, kTile>(grad_weight, shared.b[0][warpgroup], shared.y[stage]);
  };
  const auto issue_sums = [&](int stage) {
    attention::issue_output<kColumns, kTile>(da, grad_score, shared.x[stage]);
    if constexpr (kOwnsKeys) attention::issue_output<kColumns, kTile>(db, weight, shared.y[stage]);
  };
  const int column = lane % 4 * 2;  // of score[0]
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

  if (walk.count > 0) mbarrier_wait(&shared.own_pipe.full[0], 0);
  PipelineState<S::kStages> ring;
  // Only the leader waits for tiles that its warpgroup skips. The others may be that far ahead of it, not a whole
  // round.
  static_assert((S::kConsumers - 1) * 64 / kTile < S::kStages);
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
      wgmma_wait<1>();
      weigh(score, ring.index, tile);
      wgmma_wait<0>();
      differentiate(score, grad, ring.index, tile, head);
      if constexpr (kOwnsKeys) attention::pack_weights<T>(score, weight);
      attention::pack_weights<T>(grad, grad_score);
    }
    // A function, called in one loop for tiles with a mask and without. Written into the loop, or called in two, ptxas
    // (CUDA 13.0) takes the loop for one in which threads part, and runs all products one by one.
    const auto step = [&] {
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
      wgmma_wait<0>();  // the sums: weights' registers and the stage before are free
      // The other warps have read its lse and Δ as well: these went into their part of the product that has ended.
      // compute-sanitizer's racecheck does not follow that, and reports the next copy of lse and Δ.
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

  const auto store = [&](const auto& sum, float factor, T(*tile)[64 * kSlice], const CUtensorMap* map) {
    store_gradient(sum, factor, exists, tile, map, static_cast<int>(first_own), role.head_of_batch(), role.batch(),
                   1 + warpgroup, leader);
  };
  store(da, static_cast<float>(a.scale), shared.a[0][warpgroup], &in.da);
  if constexpr (kOwnsKeys) store(db, kDropout ? dropout.scale() : 1.0f, shared.b[0][warpgroup], &in.db);
  if (leader) tma_store_wait_read<0>();
}

template <bool kOwnsKeys, int kColumns, bool kDropout, class T>
__global__ void __launch_bounds__(Shape<kOwnsKeys, kColumns, 1>::kThreads, 1)
    v4_warpgroups_kernel(Args a, const __grid_constant__ Inputs in) {
  using S = Shape<kOwnsKeys, kColumns, 1>;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<S, T>*>(memory);
  // Under the causal mask the last queries and the first keys have the most partners: they begin.
  const int64_t tiles = ceil_div(Role<kOwnsKeys, T>::length(a), S::kOwned), tile = blockIdx.x % tiles;
  const Role<kOwnsKeys, T> role(a, blockIdx.x - tile + (kOwnsKeys ? tile : tiles - 1 - tile), S::kOwned);
  const Walk<kOwnsKeys, S::kTile> walk(role);

  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();

  if (warpgroup_of_block() == S::kConsumers) {
    warpgroup_reg_dealloc<S::kProducerRegisters>();
    if (threadIdx.x / kWarpSize == S::kConsumers * 4 && walk.count > 0) {
      Producer<S, kOwnsKeys, T> producer{a, shared, in};
      if (threadIdx.x % kWarpSize == 0) producer.load_own(role, 0);
      producer.load_walked(role, walk);
    }
  } else {
    warpgroup_reg_alloc<S::kRegisters>();
    consume<S, kDropout>(a, role, walk, shared, in);
  }
}

template <bool kOwnsKeys, int kColumns, bool kDropout, class T>
void launch(const Args& a, const float* lse, const float* delta, void* stream) {
  using S = Shape<kOwnsKeys, kColumns, 1>;
  const auto in = inputs_of<kOwnsKeys, S::kTile, T>(a, lse, delta);
  constexpr int kBytes = sizeof(Shared<S, T>);
  allow_shared(v4_warpgroups_kernel<kOwnsKeys, kColumns, kDropout, T>, kBytes);
  const auto blocks = static_cast<unsigned>(blocks_of<kOwnsKeys>(a, S::kOwned));
  v4_warpgroups_kernel<kOwnsKeys, kColumns, kDropout, T><<<blocks, S::kThreads, kBytes, as_stream(stream)>>>(a, in);
  check_launch();
}

}  // namespace

std::string v4_warpgroups_can_implement(const Args& a) {
  const std::string why_not = v3_mma_can_implement(a);
  if (!why_not.empty()) return why_not;
  return compute_capability() == 90 ? "" : "needs a GPU of compute capability 9.0";
}

int64_t v4_warpgroups_scratch_bytes(const Args& a) {
  return 2 * a.batch * a.heads * padded_length(a) * static_cast<int64_t>(sizeof(float));
}

void v4_warpgroups(const Args& a, void* stream) {
  attention::with_slices(a, [&](auto type, auto columns, auto drops) {
    using T = typename decltype(type)::element;
    const Scratch scratch(a, a.scratch);
    launch_delta<8, T>(a, scratch.delta, scratch.lse, padded_length(a), nullptr, stream);
    launch<false, columns.value, drops.value, T>(a, scratch.lse, scratch.delta, stream);
    launch<true, columns.value, drops.value, T>(a, scratch.lse, scratch.delta, stream);
  });
}

}  // namespace kf::KF_BACKEND::attention_backward
