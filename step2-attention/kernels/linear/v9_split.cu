// linear v9_split: where tiles are few they are smaller, and two warpgroups share the depth of each
//
// Idea      1,024 × 768 outputs are 24 tiles of 128 × 256 for 132 multiprocessors, or 96 of v7's smallest, 128 × 64.
//           But in these two consumers read the same 64 columns from shared memory, and shared memory is what such a
//           tile waits for. So both multiply the same 64 rows, by 128 columns: one takes the even stages of the depth,
//           the other one the odd ones. At the end each gives the other half of its sums, and adds what it gets.
// Since v7  Tiles of 64 rows. A stage is read by one consumer. A block has one tile, and nothing to do under which its
//           outputs could leave: they go from registers through shared memory to y, 16 bytes at a time.
// Launch    grid ⌈rows/64⌉·⌈width/w⌉, block 384; w is 64, 128, 192 or 256: with which the busiest multiprocessor is
//           done first. 12, 8, 6 or 4 stages; 161 to 193 KB of shared memory. Dependent, as v7
// Roles     warpgroup 0, 40 registers: thread 0 is the producer, warp 1 brings the bias. Warpgroups 1 and 2, 232
//           registers: consumers, of the even stages of the depth and of the odd ones
// Barriers  pipe.full: 1 arrival, the producer's, and the stage's bytes; pipe.empty: 1, the leader's of the stage's one
//           consumer. Named: kMultiplied, 256, both consumers; kGiven, 288, both and the bias's warp
// A stage   as v7's, but always the same consumer's, which releases it when its next product, two stages on, is issued
// Moves     (rows·depth + depth·width + rows·width + width)·sizeof(T) bytes at the least; 2·rows·depth·width FLOPs.
//           From the L2 cache (1/64 + 1/w)·rows·depth·width·sizeof(T) bytes, and as many from shared memory: 32 FLOP a
//           byte with w = 64, 43 with 128, 48 with 192, 51 with 256. v7's smallest tile has 43 and 32
// Limits    as v7_persistent. Where tiles are many v7's are better: they need fewer bytes from the L2 cache, and, in
//           their order, fewer from memory
#include <step2/dependent_launch.h>

#include <algorithm>

#include "half_depth.h"
#include "majors.h"
#include "rungs.h"

namespace kf::KF_BACKEND::linear {
namespace {

// A step takes a time in proportion to a tile's columns, but at least that of so many, as it waits for its bytes; to
// begin and to end takes that of so many columns times steps.
constexpr int kFewestColumns = 96, kRoundCost = 1600;

template <class Tile, class T>
__global__ void __launch_bounds__(hopper::kThreads, 1)
    v9_split_kernel(const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_weight,
                    const T* __restrict__ bias, const Rows<T> y, int k_tiles, int down) {
  launch_dependent_grids();
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<SplitShared<Tile, T>*>(memory);
  auto& epilogue = *reinterpret_cast<EpilogueStorage<Tile, T>*>(memory);  // where the stages were
  static_assert(sizeof epilogue <= Tile::kStages * Tile::kStageBytes);
  const int row = static_cast<int>(blockIdx.x) % down * kSplitRows;
  const int column = static_cast<int>(blockIdx.x) / down * Tile::kWidth;
  if (threadIdx.x == 0) {
    tma_prefetch_map(&map_x);
    tma_prefetch_map(&map_weight);
    shared.pipe.init(1);
    mbarrier_init_fence();
  }
  __syncthreads();
  wait_on_dependent_grids();  // x is there

  const int warpgroup = warpgroup_of_block();
  if (warpgroup == 0) {
    warpgroup_reg_dealloc<40>();
    if (threadIdx.x == 0) issue_all_loads(shared, &map_x, &map_weight, row, column, k_tiles);
    if (threadIdx.x / kWarpSize == 1) {
      hopper::load_bias<Tile>(shared.bias, bias, column, static_cast<int>(y.width));
      named_barrier_arrive(kGiven, kConsumerThreads + kWarpSize);
    }
  } else {
    warpgroup_reg_alloc<232>();
    const int number = warpgroup - 1;
    float sum[Tile::kWidth / 2] = {};  // a consumer without a stage adds 0
    multiply_half(sum, shared, number, k_tiles);
    exchange_halves(sum, epilogue, number);
    named_barrier_sync(kGiven, kConsumerThreads + kWarpSize);  // and the bias is there
    store_half(sum, epilogue, shared.bias, y, number, row, column);
  }
}

template <class Tile, class T>
void launch(const Args& a, void* stream) {
  const auto kernel = v9_split_kernel<Tile, T>;
  const CUtensorMap map_x = hopper::map_of<T>(a.x, Tile::kA, a.rows, a.depth, kSplitRows, hopper::kDepth);
  const CUtensorMap map_weight = hopper::map_of<T>(a.weight, Tile::kB, a.width, a.depth, Tile::kWidth, hopper::kDepth);
  const int64_t down = ceil_div(a.rows, kSplitRows), tiles = down * ceil_div(a.width, Tile::kWidth);
  constexpr int64_t kBytes = sizeof(SplitShared<Tile, T>);
  allow_shared(kernel, kBytes);
  launch_dependent(kernel, static_cast<unsigned>(tiles), hopper::kThreads, kBytes, stream, map_x, map_weight,
                   static_cast<const T*>(a.bias), Rows<T>(a.y, a.rows, a.width),
                   static_cast<int>(ceil_div(a.depth, hopper::kDepth)), static_cast<int>(down));
}

// The width of tiles with which the busiest multiprocessor is done first; tiles come in rounds of one for each.
int width_of_tiles(const Args& a) {
  const int64_t k_tiles = ceil_div(a.depth, hopper::kDepth);
  int best = 0;
  int64_t least = INT64_MAX;
  for (const int width : {64, 128, 192, 256}) {
    const int64_t tiles = ceil_div(a.rows, kSplitRows) * ceil_div(a.width, width);
    const int64_t cost = ceil_div(tiles, multiprocessors()) * (k_tiles * std::max(width, kFewestColumns) + kRoundCost);
    if (cost < least) best = width, least = cost;
  }
  return best;
}

}  // namespace

std::string v9_split_can_implement(const Args& a) { return can_implement_majors(hopper::can_implement_product, a); }

void v9_split(const Args& a, void* stream) {
  const int width = width_of_tiles(a);
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    with_majors(a, [&](auto x, auto weight) {
      constexpr Major kX = x.value, kWeight = weight.value;
      if (width == 64) return launch<SplitTile<64, kX, kWeight>, T>(a, stream);
      if (width == 128) return launch<SplitTile<128, kX, kWeight>, T>(a, stream);
      if (width == 192) return launch<SplitTile<192, kX, kWeight>, T>(a, stream);
      launch<SplitTile<256, kX, kWeight>, T>(a, stream);
    });
  });
}

}  // namespace kf::KF_BACKEND::linear
