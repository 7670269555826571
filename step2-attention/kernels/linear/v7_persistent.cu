// linear v7_persistent: a producer, consumers, and persistent blocks
//
// Idea      In v6 the tensor cores rest while threads wait, issue loads, and write outputs. So the work is divided.
//           One thread, the producer, does nothing but fill stages. Two warpgroups, the consumers, multiply 64 rows
//           each, and release a stage as soon as they have read it. Each multiprocessor has one block, which stays
//           and takes tile after tile: the producer is then already at the next one, and a tile's outputs leave under
//           its products.
// Since v6  Each stage has two barriers: full, its bytes have arrived; empty, both consumers have released it. A
//           product is waited for only when the next one has been issued. Tiles are up to 256 columns wide; setmaxnreg
//           gives consumers 232 registers, for 128 sums and the rounded outputs of the tile before, 64 words, which
//           leave by stmatrix and TMA, some columns after each step. Another warp beside the producer brings the bias.
//           Neighbours in time share rows of x or columns of the weight. Later rungs' kernel, of the same parts, is
//           step2/hopper_product.h.
// Launch    grid min(⌈rows/128⌉·⌈width/w⌉, multiprocessors), block 384. w is 256, 192, 128 or 64: with which the
//           busiest block has the fewest columns to do. 4, 4, 6 or 8 stages; 209 to 226 KB of shared memory, nearly all
//           that a block may have. Dependent (dependent_launch.h): barriers are there before the one in front has ended
// Roles     warpgroup 0, 40 registers: thread 0 is the producer, warp 1 brings biases. Warpgroups 1 and 2, 232
//           registers: consumers of 64 rows each
// Barriers  pipe.full: 1 arrival, the producer's, and the stage's bytes; pipe.empty: 2, the consumers' leaders'.
//           bias_pipe.full: 32, a warp's; bias_pipe.empty: 256, all threads' of the consumers
// A stage   empty ─ producer_acquire ─ TMA brings 128 × 64 of x and w × 64 of the weight ─ full ─ consumer_wait ─ a
//           product reads it ─ the next one is issued, this one is over ─ consumer_release by both ─ empty
// Moves     (rows·depth + depth·width + rows·width + width)·sizeof(T) bytes at the least; 2·rows·depth·width FLOPs.
//           From the L2 cache (1/128 + 1/w)·rows·depth·width·sizeof(T) bytes: with w = 256 85 FLOP a byte, 77 with 192,
//           64 with 128, 43 with 64. From shared memory a consumer reads 64 + w lines for 64·w outputs: 51, 48, 43 or
//           32 FLOP a byte
// Limits    for x and weight as v6_wgmma. Where width is no multiple of 8, or y begins at none of 16 bytes, outputs
//           leave element by element. With few tiles most multiprocessors have nothing to do
#include <step2/dependent_launch.h>
#include <step2/hopper_epilogue.h>
#include <step2/hopper_mainloop.h>
#include <step2/pipeline.h>

#include <algorithm>

#include "majors.h"
#include "rungs.h"

namespace kf::KF_BACKEND::linear {
namespace {

using hopper::EpilogueMaps, hopper::Schedule;
using hopper::kConsumers, hopper::kDepth, hopper::kRows;

template <class Tile, class T>
using Shared = hopper::StagedShared<Tile, T, Store<T>>;

// By one thread.
template <class Tile, class T>
__device__ void produce(Shared<Tile, T>& shared, const Schedule& schedule, const CUtensorMap* map_x,
                        const CUtensorMap* map_weight) {
  PipelineState<Tile::kStages> ring;
  for (int tile = blockIdx.x; tile < schedule.count(); tile += gridDim.x) {
    const Schedule::Work work = schedule.find(tile);
    const int row = work.row * kRows, column = work.column * Tile::kWidth;
    for (int k_tile = 0; k_tile < schedule.k_tiles; ++k_tile, ring.advance()) {
      shared.pipe.producer_acquire(ring, Tile::kStageBytes);
      hopper::issue_loads<Tile>(shared, ring.index, map_x, map_weight, row, column, k_tile * kDepth, 0);
    }
  }
}

// By a warpgroup. `deferred`: a warp's outputs of the tile before, which leave under this one's products.
template <class Tile, class T>
__device__ void consume(Shared<Tile, T>& shared, const Schedule& schedule,
                        hopper::Deferred<Tile, T, Store<T>>& deferred) {
  const int number = warpgroup_of_block() - 1;
  const bool leader = leads_warpgroup(number);
  float sum[Tile::kWidth / 2];
  PipelineState<Tile::kStages> ring;
  PipelineState<2> of_bias;
  int in_use = -1;  // the stage that the product in flight reads
  const auto release = [&] {
    if (leader && in_use >= 0) shared.pipe.consumer_release(in_use);
    in_use = -1;
  };
  const auto multiply_stage = [&](bool accumulate) {
    shared.pipe.consumer_wait(ring);
    hopper::multiply<Tile>(sum, shared.a[ring.index] + number * 64 * kDepth, shared.b[ring.index], accumulate);
    wgmma_wait<1>();  // the product before, not this one: so there is always one in the tensor cores' queue
    release();
    in_use = ring.index;
    ring.advance();
  };

  int tile = blockIdx.x;
  Schedule::Work work = schedule.find(tile);
  while (tile < schedule.count()) {
    const int row = work.row * kRows + number * 64 + static_cast<int>(threadIdx.x) / kWarpSize % 4 * hopper::kWarpRows;
    const typename hopper::Deferred<Tile, T, Store<T>>::Corner corner{row, work.column * Tile::kWidth};
    multiply_stage(false);
    tile += gridDim.x;
    if (tile < schedule.count()) work = schedule.find(tile);  // divisions take their time: under a product
    for (int k_tile = 1; k_tile < schedule.k_tiles; ++k_tile) {
      multiply_stage(true);
      deferred.advance(corner, 2);  // under a product a part of what waits
    }
    while (deferred.busy()) deferred.advance(corner, 2);  // more parts than stages along the depth
    wgmma_wait<0>();
    release();
    shared.bias_pipe.consumer_wait(of_bias);
    deferred.rounded.take(sum, shared.bias[of_bias.index]);
    shared.bias_pipe.consumer_release(of_bias.index);
    of_bias.advance();
    deferred.begin(corner);
  }
  while (deferred.busy()) deferred.advance(deferred.waits, 1);
  if (deferred.leader()) tma_store_wait_read<0>();  // shared memory must last so long
}

template <class Tile, class T>
__global__ void __launch_bounds__(hopper::kThreads, 1)
    v7_persistent_kernel(const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_weight,
                         const __grid_constant__ EpilogueMaps maps, const Schedule schedule, const T* bias, int width,
                         bool by_tma, const Store<T> store) {
  launch_dependent_grids();
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<Tile, T>*>(memory);
  if (threadIdx.x == 0) {
    tma_prefetch_map(&map_x);
    tma_prefetch_map(&map_weight);
    shared.pipe.init(kConsumers);
    hopper::init_epilogue(shared);
    mbarrier_init_fence();
  }
  __syncthreads();
  wait_on_dependent_grids();  // x is there

  if (warpgroup_of_block() == 0) {
    warpgroup_reg_dealloc<40>();
    if (threadIdx.x == 0) produce<Tile, T>(shared, schedule, &map_x, &map_weight);
    if (threadIdx.x / kWarpSize == 1) hopper::load_biases<Tile>(shared, schedule, bias, width);
    __syncwarp();
  } else {
    warpgroup_reg_alloc<232>();
    hopper::Deferred<Tile, T, Store<T>> deferred(shared, maps, store, by_tma);
    consume<Tile, T>(shared, schedule, deferred);
  }
}

template <class Tile, class T>
void launch(const Args& a, void* stream) {
  const hopper::Maps maps = hopper::maps_of<Tile, T>(product_of(a));
  const Schedule schedule = hopper::schedule_of<Tile>(product_of(a));
  const Store<T> store{{a.y, a.rows, a.width}};
  EpilogueMaps of_y{};
  if (store.out.vectors) of_y.out = hopper::map_of_rows(store.out);
  const auto kernel = v7_persistent_kernel<Tile, T>;
  constexpr int64_t kBytes = sizeof(Shared<Tile, T>);
  allow_shared(kernel, kBytes);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(schedule.count(), multiprocessors()));
  launch_dependent(kernel, blocks, hopper::kThreads, kBytes, stream, maps.a, maps.b, of_y, schedule,
                   static_cast<const T*>(a.bias), static_cast<int>(a.width), store.out.vectors, store);
}

}  // namespace

std::string v7_persistent_can_implement(const Args& a) {
  return can_implement_majors(hopper::can_implement_product, a);
}

void v7_persistent(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    with_majors(a, [&](auto x, auto weight) {
      hopper::with_tile_width<1>(product_of(a), [&](auto columns) {
        launch<hopper::Tile<decltype(columns)::value, x.value, weight.value, 1>, T>(a, stream);
      });
    });
  });
}

}  // namespace kf::KF_BACKEND::linear
