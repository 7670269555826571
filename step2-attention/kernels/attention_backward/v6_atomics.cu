// attention_backward v6_atomics: five products, and blocks add what they have for dq to memory
//
// Idea      Two kernels that own different rows compute each weight twice: seven products. A block that owns keys has
//           everything for its keys' share of dq as well, so five would do, but other blocks have other keys' shares of
//           the same dq. So each adds its share, in float32, to what is in memory, by atomic additions: TMA adds a tile
//           at a time. In which order they come depends on the clock, and a sum of floats on the order: two runs may
//           differ in their last bits.
// Since v5  One kernel, not two. Gradients of scores go through shared memory to a third warpgroup, which computes the
//           shares of dq. Sums are cleared before and rounded afterwards. Queries from the last to the first, and two
//           consumers that take turns at the tensor cores, as in attention's v7.
// Launch    Δ and lse as v5, which also clears B·H·⌈Sq/64⌉ sums of 16 KB. Then as many blocks as multiprocessors, or as
//           tiles of 128 keys, of 4 warpgroups: 2 consumers, dq's, and one with the producer's warp and two that send
//           shares. 212 KB of shared memory. Then a block of 128 threads for each sum
// Moves     B·H·((3 + 2·⌈Sk/128⌉)·Sq·D·2 + (1 + ⌈Sk/128⌉)·8·Sq·64) + 8·B·Hkv·Sk·D bytes, most of them within the L2
//           cache; 10·B·H·Sq·Sk·64 FLOPs (causal: half at Sq = Sk), B·H·Sq·Sk exponentials
// Limits    float16, bfloat16; D ≤ 64, a multiple of 8; compute capability 9.0. With dropout registers spill. No two
//           runs need be the same: it refuses where torch wants deterministic algorithms, and `auto` never takes it.
//           Scratch of 256 bytes a query more than v5's. It rounds the weights and their gradients
#include "five_products.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_backward {
namespace {

// What the kernel for Δ does besides: sums begin at 0.
struct ClearSums : QueryRows {
  float* sums;
  int64_t tiles;  // of a head

  __device__ void operator()(const Args&, int64_t head, int64_t query) const {
    if (query >= tiles * Five::kTile) return;
    float* const row = sums + (head * tiles * Five::kTile + query) * kSlice;
    for (int d = static_cast<int>(threadIdx.x) * 4; d < kSlice; d += kDeltaLanes * 4) {
      store_vector(row + d, Vector<float, 4>{});
    }
  }
};

template <bool kDropout, class T>
__global__ void __launch_bounds__(Five::kThreads, 1)
    v6_atomics_kernel(Args a, const __grid_constant__ Inputs in, Queue queue, float* sums) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Block<false, T>*>(memory);
  const int q_tiles = tiles_of_queries(a);
  const auto prepare = [&](const Unit& unit, int head, int row, float (&sum)[kSlice / 2], float* stage) {
    put_sum(sum, stage);
    return Job{Job::kAdd, unit.batch, head, row, int64_t{head} * q_tiles + row / Five::kTile, 0};
  };
  const auto send = [&](const Job& job, const float* sum, auto&& free) {
    bulk_add(sums + job.tile * kTileFloats, sum, kTileFloats * sizeof(float));
    tma_store_commit();
    tma_store_wait_read<0>();
    free();
  };
  run_five_products<kDropout, false>(a, queue, shared, in, nullptr, PackedUnits(nullptr), prepare, send);
}

// dq, rounded, of the tile that the block is for.
template <class T>
__global__ void v6_atomics_round_kernel(Args a, const __grid_constant__ CUtensorMap dq, const float* sums) {
  __shared__ __align__(1024) T tile[1][64 * kSlice];
  const int q_tiles = tiles_of_queries(a), heads = static_cast<int>(a.heads);
  const int head = static_cast<int>(blockIdx.x) / q_tiles, row = static_cast<int>(blockIdx.x) % q_tiles * Five::kTile;
  float sum[kSlice / 2] = {};
  add_sum(sum, sums + int64_t{blockIdx.x} * kTileFloats);
  const bool all[2] = {true, true};
  put_gradient(sum, static_cast<float>(a.scale), all, tile);
  __syncthreads();
  if (threadIdx.x != 0) return;
  tma_store(&dq, tile, 0, row, head % heads, head / heads);
  tma_store_commit();
  tma_store_wait_read<0>();
}

}  // namespace

std::string v6_atomics_can_implement(const Args& a) {
  if (a.head_dim > kSlice) return "takes at most 64 columns, got " + std::to_string(a.head_dim);
  return v4_warpgroups_can_implement(a);
}

int64_t v6_atomics_scratch_bytes(const Args& a) { return sum_bytes(a) + v5_persistent_scratch_bytes(a); }

void v6_atomics(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    auto* const sums = static_cast<float*>(a.scratch);
    const Scratch scratch(a, sums + sum_bytes(a) / sizeof(float));
    launch_delta<8, T>(a, scratch.delta, scratch.lse, padded_length(a), scratch.counter, stream,
                       ClearSums{{}, sums, tiles_of_queries(a)});
    const auto in = inputs_of<true, Five::kTile, T>(a, scratch.lse, scratch.delta);
    const Queue queue = queue_of_keys(a, scratch.counter);
    attention::with_dropout(a, [&](auto drops) {
      constexpr bool kDropout = decltype(drops)::value;
      allow_shared(v6_atomics_kernel<kDropout, T>, sizeof(Block<false, T>));
      v6_atomics_kernel<kDropout, T>
          <<<blocks_of_queue(queue), Five::kThreads, sizeof(Block<false, T>), as_stream(stream)>>>(a, in, queue, sums);
      check_launch();
    });
    v6_atomics_round_kernel<T>
        <<<static_cast<unsigned>(tiles_of(a)), kWarpgroupSize, 0, as_stream(stream)>>>(a, map_of_dq<T>(a), sums);
    check_launch();
  });
}

}  // namespace kf::KF_BACKEND::attention_backward
