// attention_backward v7_turns: shares of dq are added in turns, so that the bits are the same each time
//
// Idea      Who adds to a tile of dq, and in which order, may be settled beforehand: its keys from the first to the
//           last. A counter for each tile says whose turn it is. Waiting for turns need not cost time: all blocks walk
//           over a head's queries from the last to the first, and who owns later keys has begun no earlier. So it
//           follows a tile or two behind, at the same speed, and finds its turn come. The first one stores its share,
//           so nothing is cleared; the last one takes the sum, adds its own, and writes dq.
// Since v6  Turns. No zeros before, no kernel for rounding afterwards.
// Launch    As v6, but Δ's kernel sets counters to 0, and dq of queries that see nothing; and no kernel for rounding
// Moves     B·H·((3 + 2·⌈Sk/128⌉)·Sq·D·2 + (⌈Sk/128⌉ − 1)·8·Sq·64) + 8·B·Hkv·Sk·D bytes, most of them within the L2
//           cache; 10·B·H·Sq·Sk·64 FLOPs (causal: half at Sq = Sk), B·H·Sq·Sk exponentials
// Limits    float16, bfloat16; D ≤ 64, a multiple of 8; compute capability 9.0. With dropout registers spill. Few heads
//           of many keys wait at the beginning, a tile of keys for the one before. Scratch as v6, and a counter a tile.
//           It rounds the weights and their gradients
#include <kf/launch.h>
#include <kf/numeric.h>

#include "five_products.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_backward {
namespace {

// Where shares come together: a tile's sum, and how many have been added.
struct Turns {
  float* sums;
  unsigned* added;
};

// The counter, read so that what was added before it was set is seen as well. PTX: ld.acquire
__device__ __forceinline__ unsigned load_acquire(const unsigned* address) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Sets it, after all that this thread knows to be in memory. PTX: st.release
__device__ __forceinline__ void store_release(unsigned* address, unsigned value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void wait_for_shares(const unsigned* added, unsigned turn) {
  while (load_acquire(added) != turn) __nanosleep(20);
}

// What the kernel for Δ does besides: nobody has added anything yet, and dq of a query that sees nothing is 0. No block
// comes to its tile if all of that see nothing.
template <class T>
struct BeginTurns {
  unsigned* added;
  int64_t tiles;  // of a head

  __device__ void operator()(const Args& a, int64_t head, int64_t query) const {
    if (query % Five::kTile == 0 && query < tiles * Five::kTile && threadIdx.x == 0) {
      added[head * tiles + query / Five::kTile] = 0;
    }
    if (query >= a.q_length) return;
    const KeyRange seen = keys_seen(a, keys_of(a, head), query);
    if (seen.begin < seen.end) return;
    T* const dq = row_of(static_cast<T*>(a.dq), a.dq_stride, head, a.heads, query);
    for (int64_t d = threadIdx.x; d < a.head_dim; d += kDeltaLanes) dq[d] = T(0.0f);
  }
};

template <bool kDropout, class T>
__global__ void __launch_bounds__(Five::kThreads, 1)
    v7_turns_kernel(Args a, const __grid_constant__ Inputs in, const __grid_constant__ CUtensorMap dq, Queue queue,
                    Turns turns) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Block<T>*>(memory);
  const int q_length = static_cast<int>(a.q_length), q_tiles = tiles_of_queries(a);
  const int shift = static_cast<int>(a.k_length) - q_length;

  // dq's warpgroup: a share to be added, or, in the last turn, dq itself.
  const auto prepare = [&](const Unit& unit, int head, int row, float (&sum)[kSlice / 2], float* place) {
    const int last_query = min(row + Five::kTile, q_length) - 1;
    const int keys_end = a.causal ? min(unit.keys_end, last_query + shift + 1) : unit.keys_end;  // of those it sees
    const int mine = unit.first / Five::kOwned, first = unit.keys_begin / Five::kOwned;
    const int last = (keys_end - 1) / Five::kOwned;
    const Job job{
        mine == last ? Job::kFinish : Job::kAdd, unit.batch, head, row, int64_t{head} * q_tiles + row / Five::kTile,
        static_cast<unsigned>(mine - first)};
    if (job.kind == Job::kAdd) {
      put_sum(sum, place);
      return job;
    }
    if (job.turn > 0) {
      if (leads_warpgroup(Five::kConsumers)) wait_for_shares(turns.added + job.tile, job.turn);
      named_barrier_sync(kSumBarrier, kWarpgroupSize);
      add_sum(sum, turns.sums + job.tile * kTileFloats);
    }
    const bool all[2] = {true, true};
    put_gradient(sum, static_cast<float>(a.scale), all, reinterpret_cast<T(*)[64 * kSlice]>(place));
    return job;
  };
  // A thread that sends.
  const auto send = [&](const Job& job, const float* sum, auto&& free) {
    float* const there = turns.sums + job.tile * kTileFloats;
    if (job.turn == 0) {
      bulk_store(there, sum, kTileFloats * sizeof(float));
    } else {
      wait_for_shares(turns.added + job.tile, job.turn);
      tma_global_fence();
      bulk_add(there, sum, kTileFloats * sizeof(float));
    }
    tma_store_commit();
    tma_store_wait_read<0>();
    free();
    tma_store_wait<0>();
    store_release(turns.added + job.tile, job.turn + 1);
  };
  run_five_products<kDropout>(a, queue, shared, in, &dq, prepare, send);
}

}  // namespace

std::string v7_turns_supports(const Args& a) { return v6_atomics_supports(a); }

int64_t v7_turns_scratch(const Args& a) {
  return v6_atomics_scratch(a) + tiles_of(a) * static_cast<int64_t>(sizeof(unsigned));
}

void v7_turns(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    auto* const sums = static_cast<float*>(a.scratch);
    const Scratch scratch(a, sums + sum_bytes(a) / sizeof(float));
    const Turns turns{sums, scratch.counter + 2};
    launch_delta<8, T>(a, scratch.delta, scratch.lse, padded_length(a), scratch.counter, stream,
                       BeginTurns<T>{turns.added, tiles_of_queries(a)});
    const auto in = inputs_of<true, Five::kTile, T>(a, scratch.lse, scratch.delta);
    const Queue queue = queue_of_keys(a, scratch.counter);
    attention::with_dropout(a, [&](auto drops) {
      constexpr bool kDropout = decltype(drops)::value;
      allow_shared(v7_turns_kernel<kDropout, T>, sizeof(Block<T>));
      v7_turns_kernel<kDropout, T><<<blocks_of_queue(queue), Five::kThreads, sizeof(Block<T>), as_stream(stream)>>>(
          a, in, map_of_dq<T>(a), queue, turns);
      check_launch();
    });
  });
}

}  // namespace kf::KF_BACKEND::attention_backward
