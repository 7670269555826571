// mlp v7_inner: few rows, the inner width shared out
//
// Idea      An inner column is used up by the block that computes it: its activation times its row of W2 is a part of
//           every sum of y. So nobody needs to wait for the whole grid. A cluster of 8 blocks owns a slice of the inner
//           width: each block computes 1/8 of it, at full depth, and pushes the activation into the shared memory of
//           all eight; then each multiplies the slice by 1/8 of the columns of W2. What goes through memory is the
//           clusters' parts of y, in float32, which a second kernel adds up in their order.
// Since v5  The barrier of the grid becomes one of a cluster, and weights of both layers are asked for in advance, as
//           many as there is room for; where there is none, stages are used again. x comes once a cluster: each block
//           loads 1/8 of it for all. Memory is asked in the order of need: the first layer's weights before the
//           cluster has met, x when it has, the second layer's weights when x is there. The second kernel is launched
//           while the first runs (programmatic dependent launch), has bias and residual in registers when that one
//           ends, and only adds. inner_slice.h has the rest
// Launch    twice. Clusters of 8 blocks of 512 threads: three warpgroups multiply, each every third piece of the depth,
//           then of the columns; for each of them a warp loads weights, and one more x. 225 KB of shared memory. A
//           block has 32 inner columns, or up to 64 where all clusters would not fit at once. Then grid
//           (⌈width/512⌉, rows), block 64: a thread for eight elements of y
// Roles     warps 0 to 11: three groups that multiply. A thread of each of warps 12 to 14 loads a group's weights, one
//           of warp 15 the block's eighth of x
// Barriers  full: 1 arrival and 8 KB; empty: 4, a lane's of each warp of the group. x_full, in each block: 1 and the
//           bytes of all eight blocks' loads; x_empty: 32, of 4 warps in each of 8 blocks. activation_full: 1 and the
//           bytes of the slice. The cluster's, once: all these are there
// A stage   of weights: load issued ─ full ─ product ─ empty ─ the next load. Of x: the eight blocks' loads, each into
//           all ─ full ─ its products ─ empty in all blocks ─ the next loads
// Moves     (2·rows·width + 2·width·inner + width + inner)·sizeof(T) + 8·clusters·rows·width bytes, of which the last
//           stay in the L2 cache; residual and preactivation if there are any, besides; 4·rows·width·inner FLOPs
// Limits    compute capability 9.0; float16 and bfloat16; rows ≤ 64, width and inner multiples of 8, x and weights at
//           multiples of 16 bytes. Both products and the activation: it rounds what lies between
#include <step2/dependent_launch.h>

#include "can_implement.h"
#include "inner_slice.h"

namespace kf::KF_BACKEND::mlp {
namespace {

constexpr int kAddThreads = 64;

template <Major kWeight, class T>
__global__ void __launch_bounds__(kInnerThreads, 1)
    v7_inner_kernel(const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_1,
                    const __grid_constant__ CUtensorMap map_2, const __grid_constant__ InnerArgs<T> args) {
  launch_dependent_grids();  // it waits for the end of this one
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<InnerShared<T>*>(memory);
  const Plan& plan = args.plan;
  // Three warpgroups multiply. Of the fourth, one thread of a warp loads weights for each of them, and one x.
  const int warp = warp_uniform(static_cast<int>(threadIdx.x / kWarpSize)), loader = warp - kMultipliers / kWarpSize;
  const Pieces pieces{plan, static_cast<int>(cluster_rank_of_block()), static_cast<int>(blockIdx.x) / kCluster,
                      loader < 0 ? warp / 4 : loader};
  const bool loads = loader >= 0 && threadIdx.x % kWarpSize == 0;
  const int at_first = min(pieces.first_layer(), plan.stages);  // pieces for which nobody need be waited for
  if (loads && loader < kGroups) {
    for (int piece = 0; piece < plan.stages; ++piece) {
      mbarrier_init(&shared.full[pieces.stage(piece)], 1);
      mbarrier_init(&shared.empty[pieces.stage(piece)], kWarpgroupSize / kWarpSize);
    }
    mbarrier_init_fence();
  } else if (loads) {
    for (int group = 0; group < kGroups; ++group) {
      mbarrier_init(&shared.x_full[group], 1);
      mbarrier_init(&shared.x_empty[group], kCluster * kWarpgroupSize / kWarpSize);
    }
    mbarrier_init(&shared.activation_full, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_tx(&shared.activation_full, plan.rows * plan.slice() * sizeof(T));
    tma_prefetch_map(&map_x);
  }
  __syncwarp();
  cluster_barrier_arrive_relaxed();
  // While the cluster meets: what needs no other block of it.
  if (loads && loader < kGroups) {
    for (int piece = 0; piece < at_first; ++piece) issue_piece_load<kWeight>(shared, pieces, piece, &map_1, &map_2);
  }
  if (static_cast<int>(threadIdx.x) < plan.columns / 8) {
    const int column = pieces.inner_column() + threadIdx.x * 8;
    shared.bias[threadIdx.x] = args.bias_1.has(0, column) ? args.bias_1.load(0, column) : Packed<T>{};
  }
  __syncwarp();
  cluster_barrier_wait();  // the barriers of all blocks are there

  if (loader < 0) {
    multiply_both<kWeight>(shared, pieces, args);
  } else if (loads && loader < kGroups) {
    // The second layer's weights would come before x, which is needed earlier. Where x comes at once, wait for it.
    if (plan.k_tiles <= kGroups && loader < plan.k_tiles) mbarrier_wait_cluster(&shared.x_full[loader], 0);
    for (int piece = at_first; piece < pieces.count(); ++piece) {
      const int round = pieces.round(piece);
      if (round > 0) mbarrier_wait(&shared.empty[pieces.stage(piece)], (round - 1) % 2);
      issue_piece_load<kWeight>(shared, pieces, piece, &map_1, &map_2);
    }
  } else if (loads) {
    // Of each tile of the depth this block loads one eighth, half the rows of a box, for all.
    const int column = pieces.rank / 2 * kBox, row = pieces.rank % 2 * (plan.x_rows / 2);
    for (int k_tile = 0; k_tile < plan.k_tiles; ++k_tile) {
      const int group = k_tile % kGroups, round = k_tile / kGroups;
      if (round > 0) mbarrier_wait_cluster(&shared.x_empty[group], (round - 1) % 2);
      mbarrier_arrive_expect_tx(&shared.x_full[group], plan.x_rows * kXDeep * sizeof(T));
      tma_load_multicast(shared.x[group] + column * kMostRows + row * kBox, &map_x, &shared.x_full[group],
                         (1 << kCluster) - 1, k_tile * kXDeep + column, row);
    }
  }
}

// y = the clusters' parts + bias + residual, eight neighbours a thread.
template <class T>
__global__ void __launch_bounds__(kAddThreads)
    v7_add_kernel(const float* parts, int clusters, const Rows<T> bias, const Rows<T> residual, const Rows<T> y) {
  launch_dependent_grids();
  const int row = blockIdx.y, column = (static_cast<int>(blockIdx.x) * kAddThreads + threadIdx.x) * 8;
  const bool mine = column < y.width;
  Packed<T> of_bias, of_residual;
  if (mine) {
    of_bias = bias.load(0, column);
    if (residual.data != nullptr) of_residual = residual.load(row, column);
  }
  wait_on_dependent_grids();
  if (!mine) return;
  float total[8] = {}, b[8];
  add_parts(total, parts + row * y.width + column, clusters, y.rows * y.width);
  widen(of_bias, b);
#pragma unroll
  for (int j = 0; j < 8; ++j) total[j] += b[j];
  const Packed<T> product = packed<T>(total);
  y.store(row, column, residual.data == nullptr ? product : sum_of(product, of_residual));
}

template <Major kWeight, class T>
void launch(const Args& a, void* stream) {
  const auto kernel = v7_inner_kernel<kWeight, T>;
  const Plan plan = plan_of(a, clusters_at_once(kernel, kCluster, kInnerThreads, sizeof(InnerShared<T>)));
  const InnerArgs<T> args{plan, a.tanh, Rows<T>(a.bias_1, 1, a.inner), Rows<T>(a.preactivation, a.rows, a.inner),
                          static_cast<float*>(a.scratch)};
  const CUtensorMap map_x = hopper::map_of<T>(a.x, Major::kK, a.rows, a.width, plan.x_rows / 2, kBox);
  const CUtensorMap map_1 = map_of_pieces<T>(a.weight_1, kWeight, a.inner, a.width);
  const CUtensorMap map_2 = map_of_pieces<T>(a.weight_2, kWeight, a.width, a.inner);
  launch_in_clusters(kernel, kCluster, dim3(static_cast<unsigned>(plan.clusters * kCluster)), kInnerThreads,
                     sizeof(InnerShared<T>), stream, map_x, map_1, map_2, args);
  // A multiprocessor's memory is split in L1 cache and shared memory one way at a time. With another split than the
  // first kernel's the blocks of the second could not begin beside those of the first.
  const auto add = v7_add_kernel<T>;
  check(cudaFuncSetAttribute(add, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        "cudaFuncSetAttribute");
  launch_dependent(add, dim3(static_cast<unsigned>(ceil_div(a.width, 8 * kAddThreads)), plan.rows), kAddThreads, 0,
                   stream, static_cast<const float*>(a.scratch), plan.clusters, Rows<T>(a.bias_2, 1, a.width),
                   Rows<T>(a.residual, a.rows, a.width), Rows<T>(a.y, a.rows, a.width));
}

}  // namespace

std::string v7_inner_can_implement(const Args& a) { return can_implement_few_rows(a, kMostRows); }

// For as many clusters as there are at the most: how many, the launch decides.
int64_t v7_inner_scratch_bytes(const Args& a) {
  return ceil_div(a.inner, kCluster * kColumns) * a.rows * a.width * static_cast<int64_t>(sizeof(float));
}

void v7_inner(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    with_major_of_weight(a.weight_transposed, [&](auto weight) { launch<weight.value, T>(a, stream); });
  });
}

}  // namespace kf::KF_BACKEND::mlp
