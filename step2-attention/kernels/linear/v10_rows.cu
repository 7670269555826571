// linear v10_rows: few rows, so the weight is all there is to read, and a cluster shares its depth
//
// Idea      With 64 rows or fewer a product reads its weight once and does little with it: 4.7 MB for GPT-2's widest,
//           which an H200's memory could deliver in 1.1 µs. The more multiprocessors ask for it at once, the better. So
//           a cluster shares a tile's depth. A block sends its sums to those that add them up, in the blocks' order.
// Since v9  Several blocks share a depth, not a block's warpgroups. Tiles are 64 × 64, of one warpgroup, which also
//           loads: all stages are loaded at once. Sums go to other blocks by stores that a barrier there counts.
// Launch    grid (⌈width/64⌉·c, ⌈rows/64⌉), block 128, clusters of c ≤ 8 along the depth: so many that the busiest
//           multiprocessor has the fewest steps of 64; 126 KB of shared memory
// Roles     one warpgroup: thread 0 issues loads; all multiply, send and add up
// Barriers  full: 1 arrival and 16 KB. arrived: 1 and the bytes of all other blocks' sums. The cluster's, once: the
//           others' barriers are there, so sums may be sent
// A stage   load issued ─ full ─ its product is waited for ─ __syncthreads, if the depth has more stages ─ the next
//           load
// Moves     (rows·depth + depth·width + rows·width + width)·sizeof(T) bytes at the least; 2·rows·depth·width FLOPs, and
//           up to 64 times as many, as rows of a tile may be empty
// Limits    compute capability 9.0; float16 and bfloat16. x not transposed; depth (and width, if the weight is not
//           transposed) a multiple of 8, x and weight at multiples of 16 bytes; rows ≤ 64·65535. Each 64 rows read the
//           weight again
#include <step2/cluster.h>
#include <step2/hopper_mainloop.h>

#include "majors.h"
#include "operands.h"
#include "rungs.h"

namespace kf::KF_BACKEND::linear {
namespace {

constexpr int kTile = 64, kStages = 6, kMostBlocks = 8;
constexpr int kGroup = 8, kGroups = kTile / kGroup;  // columns that one thread rounds and stores

template <class T>
struct Shared {
  T x[kStages][kTile * hopper::kDepth];
  T weight[kStages][kTile * hopper::kDepth];
  float sums[kMostBlocks + kGroups - 1][kTile * kGroup];  // [block][the groups of columns that this block adds up]
  uint64_t full[kStages], arrived;
};

template <Major kWeight, class T>
__global__ void __launch_bounds__(kWarpgroupSize)
    v10_rows_kernel(const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_weight,
                    const T* __restrict__ bias, const Rows<T> y, int all_steps, int steps_a_block) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<T>*>(memory);
  const int blocks = static_cast<int>(cluster_blocks()), rank = static_cast<int>(cluster_rank_of_block());
  const int row = blockIdx.y * kTile, column = blockIdx.x / blocks * kTile;
  const int rows = static_cast<int>(min(y.rows - row, int64_t{kTile}));
  const int first_step = rank * steps_a_block, steps = min(steps_a_block, all_steps - first_step);
  // Group g of the columns is added up by block g % blocks, as its group g / blocks.
  const auto groups_of = [&](int block) { return (kGroups - block + blocks - 1) / blocks; };
  const int groups = groups_of(rank);
  const auto issue_loads = [&](int step) {  // by one thread
    const int stage = step % kStages, k = (first_step + step) * hopper::kDepth;
    mbarrier_arrive_expect_tx(&shared.full[stage], sizeof shared.x[0] + sizeof shared.weight[0]);
    tma_load(shared.weight[stage], &map_weight, &shared.full[stage], kWeight == Major::kK ? k : column,
             kWeight == Major::kK ? column : k);
    tma_load(shared.x[stage], &map_x, &shared.full[stage], k, row);
  };
  if (threadIdx.x == 0) {
    for (uint64_t& full : shared.full) mbarrier_init(&full, 1);
    mbarrier_init(&shared.arrived, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_tx(&shared.arrived, (blocks - 1) * groups * rows * kGroup * static_cast<int>(sizeof(float)));
    for (int step = 0; step < min(steps, kStages); ++step) issue_loads(step);
  }
  __syncthreads();                   // the barriers are there
  cluster_barrier_arrive_relaxed();  // in the other blocks: to be known before the first sum is sent

  float sum[kTile / 2] = {};
  for (int step = 0; step < steps; ++step) {
    const int stage = step % kStages;
    mbarrier_wait(&shared.full[stage], step / kStages % 2);
    hopper::multiply<hopper::Tile<kTile, Major::kK, kWeight, 1>>(sum, shared.x[stage], shared.weight[stage], true);
    wgmma_wait<0>();
    if (step + kStages < steps) {
      __syncthreads();  // all have read the stage
      if (threadIdx.x == 0) issue_loads(step + kStages);
    }
  }

  cluster_barrier_wait();
  const int lane = threadIdx.x % kWarpSize, first_row = static_cast<int>(threadIdx.x / kWarpSize) * 16 + lane / 4;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int owner = group % blocks;
    float* const own_sums = shared.sums[rank * groups_of(owner) + group / blocks];
    const uint32_t to = remote_address(own_sums, owner), arrived = remote_address(&shared.arrived, owner);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = first_row + half * 8, at = r * kGroup + lane % 4 * 2, i = 4 * group + 2 * half;
      if (r >= rows) continue;
      if (owner == rank) {
        store_vector<2>(own_sums + at, Vector<float, 2>{{sum[i], sum[i + 1]}});
      } else {
        store_remote_async(to + at * static_cast<uint32_t>(sizeof(float)), Pair<float>{sum[i], sum[i + 1]}, arrived);
      }
    }
  }
  __syncthreads();                            // this block's own sums are there
  mbarrier_wait_cluster(&shared.arrived, 0);  // and the others'

  // Eight neighbours a thread; the blocks' parts in their order.
  for (int v = threadIdx.x; v < rows * groups; v += kWarpgroupSize) {
    const int r = v / groups, group = v % groups, c = column + (group * blocks + rank) * kGroup;
    float total[kGroup] = {};
    for (int block = 0; block < blocks; ++block) {
      const float* const from = shared.sums[block * groups + group] + r * kGroup;
      const auto low = load_vector<4>(from), high = load_vector<4>(from + 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) total[j] += low.element[j], total[4 + j] += high.element[j];
    }
#pragma unroll
    for (int j = 0; j < kGroup; ++j) total[j] += c + j < y.width ? bias_at(bias, c + j) : 0.0f;
    if (y.has(row + r, c)) y.store(row + r, c, packed<T>(total));
  }
}

struct Blocks {
  int64_t steps, steps_a_block, blocks;  // blocks of a cluster
};

// The number of blocks with which the busiest multiprocessor has the fewest steps; of two that are alike, the smaller.
Blocks blocks_of(const Args& a) {
  const int64_t steps = ceil_div(a.depth, hopper::kDepth), tiles = ceil_div(a.width, kTile) * ceil_div(a.rows, kTile);
  Blocks best{steps, steps, 1};
  int64_t fewest = ceil_div(tiles, multiprocessors()) * steps;
  for (int64_t wanted = 2; wanted <= kMostBlocks; ++wanted) {
    const int64_t each = ceil_div(steps, wanted), blocks = ceil_div(steps, each);
    const int64_t busiest = ceil_div(tiles * blocks, multiprocessors()) * each;
    if (busiest < fewest) best = {steps, each, blocks}, fewest = busiest;
  }
  return best;
}

template <Major kWeight, class T>
void launch(const Args& a, void* stream) {
  const Blocks b = blocks_of(a);
  const CUtensorMap map_x = hopper::map_of<T>(a.x, Major::kK, a.rows, a.depth, kTile, hopper::kDepth);
  const CUtensorMap map_weight = hopper::map_of<T>(a.weight, kWeight, a.width, a.depth, kTile, hopper::kDepth);
  const dim3 grid(static_cast<unsigned>(ceil_div(a.width, kTile) * b.blocks),
                  static_cast<unsigned>(ceil_div(a.rows, kTile)));
  launch_in_clusters(v10_rows_kernel<kWeight, T>, b.blocks, grid, kWarpgroupSize, sizeof(Shared<T>), stream, map_x,
                     map_weight, static_cast<const T*>(a.bias), Rows<T>(a.y, a.rows, a.width),
                     static_cast<int>(b.steps), static_cast<int>(b.steps_a_block));
}

}  // namespace

std::string v10_rows_can_implement(const Args& a) {
  if (a.x_transposed) return "takes x that is not transposed";
  if (a.rows > kTile * 65535)
    return "takes rows ≤ " + std::to_string(kTile * 65535) + ", got " + std::to_string(a.rows);
  return hopper::can_implement_product(product_of(a), major_of_x(a), major_of_weight(a), a.dtype);
}

void v10_rows(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    a.weight_transposed ? launch<Major::kK, T>(a, stream) : launch<Major::kMN, T>(a, stream);
  });
}

}  // namespace kf::KF_BACKEND::linear
