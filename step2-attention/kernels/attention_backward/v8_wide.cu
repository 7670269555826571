// attention_backward v8_wide: five products at head_dims beyond 64
//
// Idea      Sums of dk and dv of 128 columns are 128 registers of a consumer's thread, and none are left for a
//           warpgroup that sums up dq. So the consumers do it, half of the columns each, and each needs the other's
//           gradients of scores. Not to wait for them, dq of a tile is computed one tile later: while the tensor cores
//           do it, the next tile's weights are computed.
// Since v7  No warpgroup for dq. A tile's scores and the dq of the tile before are issued together, then the gradients
//           of weights, then dk and dv; tiles come one after the other, and it is the other consumer that keeps the
//           tensor cores busy meanwhile. One stage for own keys and values: the next ones are waited for.
// Launch    Δ's kernel as in v7. Then a grid of as many blocks as there are multiprocessors, or tiles of 128 keys if
//           they are fewer; block 384: two consumers of 240 registers, and a warpgroup of 24, of which one warp loads
//           and two send; 227 KB of shared memory
// Roles     warpgroups 0 and 1, 240 registers: consumers of 64 keys each, and of half of dq's columns. Warpgroup 2, 24:
//           warp 0 is the producer, a thread of each of warps 1 and 2 sends a consumer's sums of dq
// Barriers  own_pipe and pipe: full 1 arrival and the bytes; empty 2, the consumers' leaders'. raw as in v5.
//           scores_full: 8, a lane's of each consumer warp. sums_pipe: full 4, a lane's of each warp of the consumer;
//           empty 1, the sender's. Named: 128, each consumer's own; 256, both
// A stage   of the ring: empty ─ producer_acquire ─ TMA ─ full ─ scores, gradients of weights, dk and dv, each waited
//           for ─ consumer_release by both ─ empty. Of grad_score: written by both ─ full ─ multiplied a tile later,
//           before the tile after that is written
// Moves     B·H·((3 + 2·⌈Sk/128⌉)·Sq·D·2 + (⌈Sk/128⌉ − 1)·8·Sq·128) + 8·B·Hkv·Sk·D bytes, most of them within the L2
//           cache; 10·B·H·Sq·Sk·128 FLOPs (causal: half at Sq = Sk), B·H·Sq·Sk exponentials
// Limits    float16, bfloat16; D ≤ 128, a multiple of 8; compute capability 9.0. Registers spill, with dropout many.
//           Scratch: twice v7's sums. It rounds the weights and their gradients
#include "rungs.h"
#include "turns.h"

namespace kf::KF_BACKEND::attention_backward {
namespace {

struct Wide {
  static constexpr int kConsumers = 2;
  static constexpr int kReaders = kConsumers;
  static constexpr int kBuffers = 1;
  static constexpr int kOwned = kConsumers * 64;
  static constexpr int kTile = 64;
  static constexpr int kStages = 3;
  static constexpr int kSlices = 2;
  static constexpr int kColumns = kSlices * kSlice;
  static constexpr int kRegisters = 240;  // 2·240 + 24: what three warpgroups have
  static constexpr int kProducerRegisters = 24;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupSize;
};
static_assert(Wide::kOwned == Five::kOwned && Wide::kTile == Five::kTile, "turns count tiles of these sizes");

// Named barriers: 1 and 2 are each consumer's own, 3 that of both.
constexpr int kOwnBarrier = 1, kBothBarrier = 3;

// Of arrays of kConsumers each consumer has one: of dq a slice of its columns.
template <bool kPacked, class T>
struct WideBlock : Shared<Wide, T> {
  using Element = T;
  alignas(1024) T grad_score[2][Wide::kConsumers][64 * kSlice];  // two stages; rows of keys, columns of queries
  float dq[Wide::kConsumers][kTileFloats];                       // on its way out, in the order of lane_of_tile
  Job job[Wide::kConsumers];
  uint64_t scores_full[2];
  Pipeline<Wide::kConsumers> sums_pipe;
  UnitOf<kPacked> unit[Wide::kBuffers];

  __device__ void init_barriers() {
    Shared<Wide, T>::init_barriers();
    for (uint64_t& full : scores_full) mbarrier_init(&full, Wide::kConsumers * 4);  // by warps
    sums_pipe.init(1, 4);
    mbarrier_init_fence();
  }
};

template <bool kDropout, bool kPacked, class T>
__device__ void consume_wide(const Args& a, WideBlock<kPacked, T>& shared, const Inputs& in, const Turns& turns) {
  constexpr int kTile = Wide::kTile, kColumns = Wide::kColumns;
  using PerQuery = OfQueries<kTile / 2>;
  using Scores = float[kTile / 2];  // a lane's, of 64 keys against a tile; or of dq, 64 queries and 64 columns
  const int warpgroup = warpgroup_of_block();
  const bool leader = leads_warpgroup(warpgroup), first_of_warp = threadIdx.x % kWarpSize == 0;
  const Lane lane;
  const float scale = static_cast<float>(a.scale * kLog2e);
  const int heads_together = static_cast<int>(a.heads) / static_cast<int>(a.kv_heads);

  attention::AttentionDropout dropout(a);
  PipelineState<1> buffer;
  PipelineState<2> handed, multiplied;  // grad_score: written, and read for dq
  PipelineState<Wide::kStages> ring;
  int sums_phase = 0;
  const auto give = [&](const Job& job) {
    if (leader) shared.job[warpgroup] = job;
    __syncwarp();
    if (first_of_warp) mbarrier_arrive(&shared.sums_pipe.full[warpgroup]);
  };
  const auto wait_for_stage = [&] {
    mbarrier_wait(&shared.sums_pipe.empty[warpgroup], sums_phase ^ 1);
    sums_phase ^= 1;
  };
  for (;; buffer.advance()) {
    mbarrier_wait(&shared.own_pipe.full[0], buffer.phase);
    const auto unit = in_all_lanes(shared.unit[0]);
    if (unit.count < 0) break;
    const int first = unit.first + warpgroup * 64;
    const Part part(a, unit, first);
    const KeysOfLane keys(a, unit, first + lane.key);
    auto& k = shared.a[0][warpgroup];
    auto& v = shared.b[0][warpgroup];
    float dk[kColumns / 2] = {}, dv[kColumns / 2] = {};
    uint32_t weight[kTile / 16][4], grad_score[kTile / 16][4];

    const auto hand_over = [&] {  // what dq needs of these keys
      put_grad_score(grad_score, shared.grad_score[handed.index][warpgroup], lane.offset);
      __syncwarp();
      if (first_of_warp) mbarrier_arrive(&shared.scores_full[handed.index]);
      handed.advance();
    };
    const auto issue_sum = [&](Scores& sum) {  // this half of dq of the tile that was handed over last
      issue_dq(sum, shared.grad_score[multiplied.index], shared.a[0], warpgroup);
      multiplied.advance();
    };
    const auto send = [&](Scores& sum, int head, int tile) {
      wait_for_stage();
      give(turns.put<T>(a, shared.unit[0], head, unit.base + tile * kTile, warpgroup, sum, shared.dq[warpgroup], leader,
                        kOwnBarrier + warpgroup));
    };

    const int first_head = (unit.batch * static_cast<int>(a.kv_heads) + unit.head) * heads_together;
    for (int head = first_head; head < first_head + heads_together; ++head) {
      // Both consumers compute every tile, seen or not: dq needs both.
      for (int tile = unit.count - 1; tile >= 0; --tile, ring.advance()) {
        const int query = unit.base + tile * kTile + lane.query;
        const bool has_before = tile < unit.count - 1;
        const bool whole = part.is_whole(tile);
        Scores score, grad;
        shared.pipe.consumer_wait(ring);
        {
          Scores sum;
          if (has_before) mbarrier_wait(&shared.scores_full[multiplied.index], multiplied.phase);
          wgmma_fence();
          attention::issue_scores<kColumns, kTile>(score, k, shared.x[ring.index]);
          if (has_before) {
            issue_sum(sum);
            const PerQuery lse(shared.lse[ring.index] + lane.query);
            wgmma_wait<1>();
            weigh(score, lse, scale, whole, query, keys);
            wgmma_wait<0>();
            send(sum, head, tile + 1);
          } else {
            const PerQuery lse(shared.lse[ring.index] + lane.query);
            wgmma_wait<0>();
            weigh(score, lse, scale, whole, query, keys);
          }
        }
        wgmma_fence();
        attention::issue_scores<kColumns, kTile>(grad, v, shared.y[ring.index]);
        const PerQuery delta(shared.delta[ring.index] + lane.query);
        wgmma_wait<0>();
        uint64_t kept = 0;
        if constexpr (kDropout) kept = drop_gradients<true>(dropout, grad, head, first + lane.key, query);
        differentiate(score, grad, delta, whole);
        if constexpr (kDropout) attention::AttentionDropout::drop(score, kept);  // as v met them
        attention::pack_weights<T>(score, weight);
        attention::pack_weights<T>(grad, grad_score);
        hand_over();
        wgmma_fence();
        attention::issue_output<kColumns, kTile>(dv, weight, shared.y[ring.index]);
        attention::issue_output<kColumns, kTile>(dk, grad_score, shared.x[ring.index]);
        wgmma_wait<0>();
        if (leader) shared.pipe.consumer_release(ring.index);
      }
      if (unit.count > 0) {
        Scores sum;
        mbarrier_wait(&shared.scores_full[multiplied.index], multiplied.phase);
        wgmma_fence();
        issue_sum(sum);
        wgmma_wait<0>();
        send(sum, head, 0);
      }
    }
    // Gradients go out through the stages of k and v, when dq of both consumers needs no k any more.
    named_barrier_sync(kBothBarrier, Wide::kConsumers * kWarpgroupSize);
    const auto store = [&](const auto& sum, float factor, auto* tile, const CUtensorMap* map, void* to,
                           const Strides& stride) {
      store_of_keys<kPacked>(a, shared.unit[0], first, sum, factor, keys.exists, tile, map, to, stride,
                             kOwnBarrier + warpgroup, leader);
    };
    store(dk, static_cast<float>(a.scale), k, &in.da, a.dk, a.dk_stride);
    store(dv, kDropout ? dropout.scale() : 1.0f, v, &in.db, a.dv, a.dv_stride);
    if (leader) {
      tma_store_wait_read<0>();
      mbarrier_arrive(&shared.own_pipe.empty[0]);
    }
  }
  wait_for_stage();
  give(Job{});
}

template <bool kDropout, bool kPacked, class T>
__global__ void __launch_bounds__(Wide::kThreads, 1)
    v8_wide_kernel(Args a, const __grid_constant__ Inputs in, const __grid_constant__ CUtensorMap dq, Queue queue,
                   Turns turns, PackedUnits packed) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<WideBlock<kPacked, T>*>(memory);
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();
  if (warpgroup_of_block() < Wide::kConsumers) {
    warpgroup_reg_alloc<Wide::kRegisters>();
    consume_wide<kDropout, kPacked, T>(a, shared, in, turns);
    return;
  }
  warpgroup_reg_dealloc<Wide::kProducerRegisters>();
  const int warp = warp_uniform(static_cast<int>(threadIdx.x / kWarpSize)) - Wide::kConsumers * 4;
  if (warp == 0) produce<Wide, kPacked>(a, queue, shared, in, packed);
  if (warp > 0 && warp <= Wide::kConsumers) {
    const auto send = [&](const Job& job, const float* sum, auto&& free) { turns.send(job, sum, free); };
    send_sums<kPacked>(a, shared, &dq, warp - 1, (warp - 1) * kSlice, send);
  }
}

}  // namespace

std::string v8_wide_can_implement(const Args& a) { return v4_warpgroups_can_implement(without_documents(a)); }

int64_t v8_wide_scratch_bytes(const Args& a) {
  return Wide::kSlices * (sum_bytes(a) + tiles_of(a) * static_cast<int64_t>(sizeof(unsigned))) +
         v5_persistent_scratch_bytes(a) + PackedUnits::bytes(a);
}

void v8_wide(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    auto* const sums = static_cast<float*>(a.scratch);
    const Scratch scratch(a, sums + Wide::kSlices * sum_bytes(a) / sizeof(float));
    with_packing(a, [&](auto packs) {
      constexpr bool kPacked = decltype(packs)::value;
      const Turns turns{sums, scratch.counter + 2, Wide::kSlices};
      const PackedUnits packed(turns.added + Wide::kSlices * tiles_of(a));
      launch_delta<8, T>(a, scratch.delta, scratch.lse, padded_length(a), scratch.counter, stream,
                         begin_of<kPacked, T>(turns, packed));
      const auto in = inputs_of<true, Wide::kTile, T>(a, scratch.lse, scratch.delta);
      const Queue queue = queue_of_keys(a, scratch.counter);
      attention::with_dropout(a, [&](auto drops) {
        const auto kernel = v8_wide_kernel<decltype(drops)::value, kPacked, T>;
        constexpr int kBytes = sizeof(WideBlock<kPacked, T>);
        static_assert(kBytes <= 227 * 1024);
        allow_shared(kernel, kBytes);
        kernel<<<blocks_of_queue(queue), Wide::kThreads, kBytes, as_stream(stream)>>>(a, in, map_of_dq<T>(a), queue,
                                                                                      turns, packed);
        check_launch();
      });
    });
  });
}

}  // namespace kf::KF_BACKEND::attention_backward
