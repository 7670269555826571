// linear v10_rows: few rows, so the weight is all there is to read, and a cluster shares its depth
//
// Idea      With 64 rows or fewer a product reads its weight once and does little with it: 4.7 MB for GPT-2's widest,
//           which memory could deliver in 1.1 µs. The more multiprocessors ask for it at once, the better. A tile of 64
//           columns is shared by a cluster along the depth; each block multiplies its part as soon as it has come, and
//           the sums are added up through the blocks' shared memory, in their order.
// Since v9  No sums in global memory, no second kernel. Tiles are small: 64 × 64. All of a block's places are asked for
//           at once.
// Launch    grid (⌈width/64⌉·c, ⌈rows/64⌉), block 128, clusters of c ≤ 8 along the depth: so many that the busiest
//           multiprocessor has the fewest steps of 64; 96 KB of shared memory
// Moves     (rows·depth + depth·width + rows·width + width)·sizeof(T) bytes at the least; 2·rows·depth·width FLOPs, and
//           up to 64 times as many, as rows of a tile may be empty
// Limits    compute capability 9.0; float16 and bfloat16. x not transposed; depth (and width, if the weight is not
//           transposed) a multiple of 8, x and weight at multiples of 16 bytes; rows ≤ 64·65535. Each 64 rows read the
//           weight again
#include <step2/cluster.h>
#include <step3/hopper_product.h>

#include "majors.h"
#include "operands.h"
#include "rungs.h"

namespace kf::KF_BACKEND::linear {
namespace {

constexpr int kTile = 64, kPlaces = 6, kMostBlocks = 8;
constexpr int kStride = kTile + 4;  // of the sums in shared memory: padding against bank conflicts

template <class T>
struct Shared {
  T x[kPlaces][kTile * hopper::kDepth];
  T weight[kPlaces][kTile * hopper::kDepth];
  uint64_t full[kPlaces];
};

template <Major kWeight, class T>
__global__ void __launch_bounds__(kWarpgroupSize)
    v10_rows_kernel(const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_weight,
                    const T* __restrict__ bias, const Rows<T> y, int all_steps, int steps_a_block) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<T>*>(memory);
  const int blocks = static_cast<int>(cluster_blocks()), rank = static_cast<int>(cluster_rank_of_block());
  const int row = blockIdx.y * kTile, column = blockIdx.x / blocks * kTile;
  const int first_step = rank * steps_a_block, steps = max(min(steps_a_block, all_steps - first_step), 0);
  const auto fetch = [&](int step) {  // by one thread
    const int place = step % kPlaces, k = (first_step + step) * hopper::kDepth;
    mbarrier_arrive_expect(&shared.full[place], sizeof shared.x[0] + sizeof shared.weight[0]);
    tma_load(shared.weight[place], &map_weight, &shared.full[place], kWeight == Major::kK ? k : column,
             kWeight == Major::kK ? column : k);
    tma_load(shared.x[place], &map_x, &shared.full[place], k, row);
  };
  if (threadIdx.x == 0) {
    for (uint64_t& full : shared.full) mbarrier_init(&full, 1);
    mbarrier_init_fence();
    for (int step = 0; step < min(steps, kPlaces); ++step) fetch(step);
  }
  __syncthreads();  // the barriers are there

  float sum[kTile / 2] = {};  // a block without a step adds 0
  for (int step = 0; step < steps; ++step) {
    const int place = step % kPlaces;
    mbarrier_wait(&shared.full[place], step / kPlaces % 2);
    hopper::multiply<hopper::Tile<kTile, Major::kK, kWeight, 1>>(sum, shared.x[place], shared.weight[place], true);
    wgmma_wait<0>();
    if (step + kPlaces < steps) {
      __syncthreads();  // all have read the place
      if (threadIdx.x == 0) fetch(step + kPlaces);
    }
  }

  __syncthreads();  // nobody reads the places any more: the sums may lie there
  auto* const sums = reinterpret_cast<float*>(memory);
  const int lane = threadIdx.x % kWarpSize, warp_row = static_cast<int>(threadIdx.x / kWarpSize) * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < kTile / 2; i += 2) {
    store_vector<2>(sums + (warp_row + i / 2 % 2 * 8) * kStride + i / 4 * 8 + lane % 4 * 2,
                    Vector<float, 2>{{sum[i], sum[i + 1]}});
  }
  cluster_sync();  // all blocks' sums are there

  // Eight neighbours a thread; the blocks' parts in their order.
  const int rows = static_cast<int>(min(y.rows - row, int64_t{kTile}));
  for (int v = rank * kWarpgroupSize + threadIdx.x; v < rows * (kTile / 8); v += blocks * kWarpgroupSize) {
    const int r = v / (kTile / 8), c = v % (kTile / 8) * 8;
    float total[8] = {};
    for (int block = 0; block < blocks; ++block) {
      const uint32_t from = remote_address(sums + r * kStride + c, block);
      const float4 low = load_remote_4(from), high = load_remote_4(from + 16);
      const float part[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int j = 0; j < 8; ++j) total[j] += part[j];
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) total[j] += column + c + j < y.width ? bias_at(bias, column + c + j) : 0.0f;
    if (y.has(row + r, column + c)) y.store(row + r, column + c, packed<T>(total));
  }
  cluster_sync();  // no block may end while others read its sums
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

std::string v10_rows_supports(const Args& a) {
  if (a.x_transposed) return "takes x that is not transposed";
  if (a.rows > kTile * 65535)
    return "takes rows ≤ " + std::to_string(kTile * 65535) + ", got " + std::to_string(a.rows);
  return hopper::refused_product(product_of(a), major_of_x(a), major_of_weight(a), a.dtype);
}

void v10_rows(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    a.weight_transposed ? launch<Major::kK, T>(a, stream) : launch<Major::kMN, T>(a, stream);
  });
}

}  // namespace kf::KF_BACKEND::linear
