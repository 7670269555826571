// A product of matrices of half types on Hopper: out = a · b, tile by tile, by TMA and wgmma; its kernel and its
// launch.
//
// A block has three warpgroups. One thread of the first loads tiles of a and b into a ring of stages in shared
// memory; the other two, the consumers, multiply 64 rows each. Blocks stay until all tiles are done, and what follows
// the product, the epilogue, runs under the next tile's product: only the rounded sums wait in registers for it.
//
//   producer     a b a b a b a b a b a b …            the next tile's first stages are full before it begins
//   consumers    │ product of tile 0 │ product of tile 1 │ …
//   the same                         │ epilogue of 0     │ epilogue of 1 …
//
// The launch is dependent: barriers are there before the kernel in front has ended. linear's v7 has this for one block,
// written out; its parts are in hopper_mainloop.h and hopper_epilogue.h.
//
// With kBlocks = 2, two blocks of a cluster take tiles one above the other: they need the same part of b, of which each
// loads half, for both. That is a third less to be read from the L2 cache.
#pragma once

#include <kf/launch.h>
#include <step2/dependent_launch.h>
#include <step2/hopper_epilogue.h>
#include <step2/hopper_mainloop.h>

#include <algorithm>
#include <string>
#include <type_traits>

namespace kf::KF_BACKEND::hopper {

// By one thread.
template <class Tile, class Shared>
__device__ void produce(Shared& shared, const Schedule& schedule, const CUtensorMap* map_a, const CUtensorMap* map_b,
                        int rank) {
  PipelineState<Tile::kStages> ring;
  for_each_work<Tile>(schedule, [&](const Schedule::Work& work) {
    const int row = (work.row * Tile::kBlocks + rank) * kRows, column = work.column * Tile::kWidth;
    for (int k_tile = 0; k_tile < schedule.k_tiles; ++k_tile, ring.advance()) {
      shared.pipe.producer_acquire(ring, Tile::kStageBytes);
      issue_loads<Tile>(shared, ring.index, map_a, map_b, row, column, k_tile * kDepth, rank);
    }
  });
}

// A consumer's way through the ring. `sum` holds its 64 rows, as wgmma leaves them.
template <class Tile, class Shared>
struct Consumer {
  Shared& shared;
  const int number = warpgroup_of_block() - 1;
  const bool leader = leads_warpgroup(number);
  PipelineState<Tile::kStages> ring;
  int in_use = -1;  // the stage that the product in flight reads
  float sum[Tile::kWidth / 2];

  __device__ explicit Consumer(Shared& shared) : shared(shared) {}

  // One thread releases the stage in all blocks of the cluster.
  __device__ __forceinline__ void release() {
    if (leader && in_use >= 0) {
      if constexpr (Tile::kBlocks == 1) {
        shared.pipe.consumer_release(in_use);
      } else {
#pragma unroll
        for (int block = 0; block < Tile::kBlocks; ++block)
          mbarrier_arrive_remote_cta(&shared.pipe.empty[in_use], block);
      }
    }
    in_use = -1;
  }

  // Issues the product of the next stage, and waits for the one before it.
  __device__ __forceinline__ void step(bool accumulate) {
    shared.pipe.consumer_wait(ring);
    multiply<Tile>(sum, shared.a[ring.index] + number * 64 * kDepth, shared.b[ring.index], accumulate);
    wgmma_wait<1>();
    release();
    in_use = ring.index;
    ring.advance();
  }

  // After the last step: now `sum` may be read.
  __device__ __forceinline__ void wait() {
    wgmma_wait<0>();
    release();
  }
};

// A consumer's whole work: tile after tile, and under a tile's product what is `deferred` of the one before.
template <class Tile, class Consumer, class Deferred, class Shared>
__device__ __forceinline__ void consume(Consumer& consumer, Deferred& deferred, Shared& shared,
                                        const Schedule& schedule, int rank) {
  const int clusters = gridDim.x / Tile::kBlocks;
  int number = blockIdx.x / Tile::kBlocks;
  Schedule::Work work = schedule.find(number);
  PipelineState<2> of_bias;
  while (number < schedule.count()) {
    const int row = (work.row * Tile::kBlocks + rank) * kRows + consumer.number * 64;
    const typename Deferred::Corner corner{row + static_cast<int>(threadIdx.x) / kWarpSize % 4 * kWarpRows,
                                           work.column * Tile::kWidth};
    consumer.step(false);
    number += clusters;
    if (number < schedule.count()) work = schedule.find(number);  // divisions take their time: under a product
    for (int k_tile = 1; k_tile < schedule.k_tiles; ++k_tile) {   // under a product a part of what waits
      consumer.step(true);
      deferred.advance(corner, 2);
    }
    while (deferred.busy()) deferred.advance(corner, 2);  // more parts than stages along the depth
    consumer.wait();
    shared.bias_pipe.consumer_wait(of_bias);
    deferred.rounded.take(consumer.sum, shared.bias[of_bias.index]);
    shared.bias_pipe.consumer_release(of_bias.index);
    of_bias.advance();
    deferred.begin(corner);
  }
  while (deferred.busy()) deferred.advance(deferred.waits, 1);
  if (deferred.leader()) tma_store_wait_read<0>();  // shared memory must last so long
}

// What becomes of the sums, for product_kernel: they are rounded, after the bias was added, and the epilogue gets them.
template <class T, class Epilogue, template <class Tile, class Shared> class ConsumerOf>
struct RoundThen {
  template <class Tile>
  using Shared = StagedShared<Tile, T, Epilogue>;

  const T* bias;  // or null
  int width;
  bool by_tma;
  Epilogue epilogue;

  template <class Tile>
  __device__ void run(Shared<Tile>& shared, const Schedule& schedule, const EpilogueMaps& maps, int rank) const {
    ConsumerOf<Tile, Shared<Tile>> consumer(shared);
    Deferred<Tile, T, Epilogue> deferred(shared, maps, epilogue, by_tma);
    consume<Tile>(consumer, deferred, shared, schedule, rank);
  }
};

template <class Tile, class T, class CollectiveEpilogue>
__global__ void __launch_bounds__(kThreads, 1)
    product_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                   const __grid_constant__ EpilogueMaps epilogue_maps, const Schedule schedule,
                   const CollectiveEpilogue collective) {
  launch_dependent_grids();
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename CollectiveEpilogue::template Shared<Tile>*>(memory);
  const int rank = Tile::kBlocks == 1 ? 0 : static_cast<int>(cluster_rank_of_block());
  if (threadIdx.x == 0) {
    tma_prefetch_map(&map_a);
    tma_prefetch_map(&map_b);
    shared.pipe.init(kConsumers * Tile::kBlocks);
    init_epilogue(shared);
    mbarrier_init_fence();
  }
  Tile::kBlocks == 1 ? __syncthreads() : cluster_sync();
  wait_on_dependent_grids();  // operands are there

  if (warpgroup_of_block() == 0) {
    warpgroup_reg_dealloc<40>();
    if (threadIdx.x == 0) produce<Tile>(shared, schedule, &map_a, &map_b, rank);
    if (threadIdx.x / kWarpSize == 1) load_biases<Tile>(shared, schedule, collective.bias, collective.width);
    __syncwarp();
  } else {
    warpgroup_reg_alloc<232>();
    collective.template run<Tile>(shared, schedule, epilogue_maps, rank);
  }
  if (Tile::kBlocks > 1) cluster_sync();  // no block may end while others still copy into it or arrive at its barriers
}

// ---- on the host ----

// `collective`: what becomes of the sums.
template <class Tile, class T, class CollectiveEpilogue>
void launch_with_epilogue(const Product& p, const EpilogueMaps& maps, const CollectiveEpilogue& collective,
                          void* stream) {
  const Maps operands = maps_of<Tile, T>(p);
  const Schedule schedule = schedule_of<Tile>(p);
  const int64_t clusters = std::min<int64_t>(schedule.count(), multiprocessors() / Tile::kBlocks);
  const dim3 grid(static_cast<unsigned>(clusters * Tile::kBlocks));
  constexpr int64_t kBytes = sizeof(typename CollectiveEpilogue::template Shared<Tile>);
  const auto kernel = product_kernel<Tile, T, CollectiveEpilogue>;
  if constexpr (Tile::kBlocks > 1) {
    launch_dependent_in_clusters(kernel, Tile::kBlocks, grid, kThreads, kBytes, stream, operands.a, operands.b, maps,
                                 schedule, collective);
  } else {
    allow_shared(kernel, kBytes);
    launch_dependent(kernel, grid, kThreads, kBytes, stream, operands.a, operands.b, maps, schedule, collective);
  }
}

template <class Tile, class T, template <class, class> class ConsumerOf = Consumer, class E>
void launch_product(const Product& p, const E& epilogue, void* stream) {
  const bool by_tma = epilogue.out.vectors && (!E::kWrites || epilogue.written.vectors);
  EpilogueMaps maps{};
  if (by_tma) maps.out = map_of_rows(epilogue.out);
  if (by_tma && E::kWrites) maps.written = map_of_rows(epilogue.written);
  if constexpr (E::kReads) maps.read = map_of_rows(epilogue.read);
  const RoundThen<T, E, ConsumerOf> collective{static_cast<const T*>(p.bias), static_cast<int>(p.width), by_tma,
                                               epilogue};
  launch_with_epilogue<Tile, T>(p, maps, collective, stream);
}

// The same for each Epilogue. Tiles of 256 columns come in clusters of two; with them an epilogue has some thirty
// registers, with tiles of 192, alone, some eighty, and shared memory for what it reads: a heavy epilogue takes these.
enum class EpilogueCost { kLight, kHeavy };

template <EpilogueCost kEpilogueCost, Major kA, Major kB, class F>
void with_tile(const Product& p, F&& f) {
  constexpr int64_t kWide = kEpilogueCost == EpilogueCost::kLight ? 256 : 192,
                    kBlocks = kEpilogueCost == EpilogueCost::kLight ? 2 : 1;
  const int64_t of_wide = busiest(p, kWide, kBlocks), of_128 = busiest(p, 128, 1);
  if (busiest(p, 64, 1) < std::min(of_wide, of_128)) return f(Tile<64, kA, kB, 1, 7>{});
  if (of_wide <= of_128) return f(Tile<kWide, kA, kB, kBlocks, 4>{});
  f(Tile<128, kA, kB, 1, 5>{});
}

}  // namespace kf::KF_BACKEND::hopper
