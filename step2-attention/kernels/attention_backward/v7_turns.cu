// attention_backward v7_turns: shares of dq are added in turns, so that the bits are the same each time
//
// Idea      Who adds to a tile of dq, and in which order, may be settled beforehand: its keys from the first to the
//           last. A counter for each tile says whose turn it is. Waiting for turns need not cost time: all blocks walk
//           over a head's queries from the last to the first, and who owns later keys has begun no earlier. So it
//           follows a tile or two behind, at the same speed, and finds its turn come. The first one stores its share,
//           so nothing is cleared; the last one takes the sum, adds its own, and writes dq.
// Since v6  Turns. No zeros before, no kernel for rounding afterwards.
// Launch    As v6, but Δ's kernel sets counters to 0, and dq of queries that see nothing; and no kernel for rounding.
//           Of a packed row Δ's kernel also writes what blocks work on, in which order (PackedUnits)
// Roles     warpgroups 0 and 1, 192 registers: consumers of 64 keys each. Warpgroup 2, 88: dq. Warpgroup 3, 40: warp 0
//           is the producer, a thread of each of warps 1 and 2 sends sums of dq
// Barriers  own_pipe and pipe: full 1 arrival and the bytes; empty 6, the consumers' leaders' and a lane's of each of
//           dq's warps, and 2, the consumers'. raw as in v5. scores_pipe: full 8, a lane's of each consumer warp; empty
//           1, dq's leader's. sums_pipe: full 4, a lane's of each of dq's warps; empty 1, the sender's. Named: 128 of
//           each consumer, and of dq's warpgroup; 256 for the consumers' turns. In memory a counter for each tile of
//           dq: whose turn it is
// A stage   of grad_score: empty ─ both consumers write their keys' rows ─ full ─ dq's product ─ empty. Of sums: empty
//           ─ dq's warpgroup writes ─ full ─ its sender waits for the tile's turn, adds in bulk, passes the turn on ─
//           empty
// Moves     B·H·((3 + 2·⌈Sk/128⌉)·Sq·D·2 + (⌈Sk/128⌉ − 1)·8·Sq·64) + 8·B·Hkv·Sk·D bytes, most of them within the L2
//           cache; 10·B·H·Sq·Sk·64 FLOPs (causal: half at Sq = Sk), B·H·Sq·Sk exponentials
// Limits    float16, bfloat16; D ≤ 64, a multiple of 8; compute capability 9.0. With dropout registers spill. Few heads
//           of many keys wait at the beginning, a tile of keys for the one before. Scratch as v6, and a counter a tile.
//           It rounds the weights and their gradients
#include "rungs.h"
#include "turns.h"

namespace kf::KF_BACKEND::attention_backward {
namespace {

template <bool kDropout, bool kPacked, class T>
__global__ void __launch_bounds__(Five::kThreads, 1)
    v7_turns_kernel(Args a, const __grid_constant__ Inputs in, const __grid_constant__ CUtensorMap dq, Queue queue,
                    Turns turns, PackedUnits packed) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Block<kPacked, T>*>(memory);
  const auto prepare = [&](const auto& unit, int head, int row, float (&sum)[kSlice / 2], float* stage) {
    return turns.put<T>(a, unit, head, row, 0, sum, stage, leads_warpgroup(Five::kConsumers), kSumBarrier);
  };
  const auto send = [&](const Job& job, const float* sum, auto&& free) { turns.send(job, sum, free); };
  run_five_products<kDropout, kPacked>(a, queue, shared, in, &dq, packed, prepare, send);
}

}  // namespace

std::string v7_turns_can_implement(const Args& a) { return v6_atomics_can_implement(without_documents(a)); }

int64_t v7_turns_scratch_bytes(const Args& a) {
  return v6_atomics_scratch_bytes(a) + tiles_of(a) * static_cast<int64_t>(sizeof(unsigned)) + PackedUnits::bytes(a);
}

void v7_turns(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    auto* const sums = static_cast<float*>(a.scratch);
    const Scratch scratch(a, sums + sum_bytes(a) / sizeof(float));
    with_packing(a, [&](auto packs) {
      constexpr bool kPacked = decltype(packs)::value;
      const Turns turns{sums, scratch.counter + 2, 1};
      const PackedUnits packed(turns.added + tiles_of(a));
      launch_delta<8, T>(a, scratch.delta, scratch.lse, padded_length(a), scratch.counter, stream,
                         begin_of<kPacked, T>(turns, packed));
      const auto in = inputs_of<true, Five::kTile, T>(a, scratch.lse, scratch.delta);
      const Queue queue = queue_of_keys(a, scratch.counter);
      attention::with_dropout(a, [&](auto drops) {
        const auto kernel = v7_turns_kernel<decltype(drops)::value, kPacked, T>;
        constexpr int kBytes = sizeof(Block<kPacked, T>);
        allow_shared(kernel, kBytes);
        kernel<<<blocks_of_queue(queue), Five::kThreads, kBytes, as_stream(stream)>>>(a, in, map_of_dq<T>(a), queue,
                                                                                      turns, packed);
        check_launch();
      });
    });
  });
}

}  // namespace kf::KF_BACKEND::attention_backward
