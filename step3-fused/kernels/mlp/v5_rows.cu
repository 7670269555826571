// mlp v5_rows: few rows, both layers in one launch
//
// Idea      With 64 rows or fewer the products take no time, their weights' way does, and each launch. So stay: blocks
//           that are resident all at once compute the first layer as linear's v10_rows does, wait for each other, and
//           go on with the second. Only the activation is waited for: by then the second layer's first weights have
//           come.
// Since     pieces: one launch; between the layers a barrier of the whole grid, and loads that do not wait for it.
// Launch    clusters of 8 blocks, as many as are needed and fit at once, each block 128 threads, 114 KB of shared
//           memory. A tile is 64 rows by 64 columns; 1, 2, 4 or 8 neighbours of a cluster share its depth: so many that
//           the busiest block has the fewest tiles of the depth of 64. For GPT-2's 768 and 3072 pairs, then all eight
// Moves     (2·rows·width + 2·width·inner + width + inner)·sizeof(T) bytes at the least; the activation, and residual
//           and preactivation if there are any, besides; 4·rows·width·inner FLOPs
// Limits    compute capability 9.0; float16 and bfloat16; rows ≤ 64, width and inner multiples of 8, x and weights at
//           multiples of 16 bytes. Both products and the activation: it rounds what lies between
#include <cooperative_groups.h>
#include <step3/epilogues.h>

#include "can_implement.h"
#include "few_rows.h"
#include "layers.h"

namespace kf::KF_BACKEND::mlp {
namespace {

template <Major kWeight, class T, class FirstEpilogue>
__global__ void __launch_bounds__(kWarpgroupSize)
    v5_rows_kernel(const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_weight_1,
                   const __grid_constant__ CUtensorMap map_activation, const __grid_constant__ CUtensorMap map_weight_2,
                   const T* __restrict__ bias_1, const T* __restrict__ bias_2, const Share share_1, const Share share_2,
                   const FirstEpilogue gelu, const Rows<T> residual, const Rows<T> y) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<T>*>(memory);
  const int rows = static_cast<int>(y.rows);
  if (threadIdx.x == 0) {
    for (uint64_t& full : shared.full) mbarrier_init(&full, 1);
    mbarrier_init_fence();
  }
  __syncthreads();  // the barriers are there

  Multiplier<kWeight, T> first(shared, {&map_x, &map_weight_1, bias_1, static_cast<int>(gelu.out.width), share_1}, 0);
  if (threadIdx.x == 0) first.begin();
  first.run(rows, [&](int row, int column, const Packed<T>& product) {
    apply_epilogue(gelu, row, column, product, Packed<T>{});
  });

  Multiplier<kWeight, T> second(shared, {&map_activation, &map_weight_2, bias_2, static_cast<int>(y.width), share_2},
                                first.done);
  if (threadIdx.x == 0) second.begin();
  tma_global_fence();                      // what this thread has written is for TMA to read
  cooperative_groups::this_grid().sync();  // the activation is there
  tma_global_fence();
  second.run(rows, [&](int row, int column, Packed<T> product) {
    if (!y.has(row, column)) return;
    y.store(row, column, residual.data == nullptr ? product : sum_of(product, residual.load(row, column)));
  });
}

template <Major kWeight, class T, class FirstEpilogue>
void launch(const Args& a, const FirstEpilogue& gelu, void* stream) {
  const auto kernel = v5_rows_kernel<kWeight, T, FirstEpilogue>;
  allow_shared(kernel, sizeof(Shared<T>));
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "cudaFuncSetAttribute");
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = kCluster;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeCooperative;
  attributes[1].val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(kWarpgroupSize);
  config.dynamicSmemBytes = sizeof(Shared<T>);
  config.stream = as_stream(stream);
  config.attrs = attributes;
  config.numAttrs = 2;

  int resident = 0;  // clusters that fit at once
  config.gridDim = dim3(static_cast<unsigned>(multiprocessors() / kCluster * kCluster));
  check(cudaOccupancyMaxActiveClusters(&resident, kernel, &config), "cudaOccupancyMaxActiveClusters");
  const int64_t blocks = std::min<int64_t>(resident, multiprocessors() / kCluster) * kCluster;
  const Share share_1 = share_of(a.inner, a.width, blocks), share_2 = share_of(a.width, a.inner, blocks);
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  const CUtensorMap map_x = hopper::map_of<T>(a.x, Major::kK, a.rows, a.width, kTile, hopper::kDepth);
  const CUtensorMap map_1 = hopper::map_of<T>(a.weight_1, kWeight, a.inner, a.width, kTile, hopper::kDepth);
  const CUtensorMap map_h = hopper::map_of<T>(a.scratch, Major::kK, a.rows, a.inner, kTile, hopper::kDepth);
  const CUtensorMap map_2 = hopper::map_of<T>(a.weight_2, kWeight, a.width, a.inner, kTile, hopper::kDepth);
  check(cudaLaunchKernelEx(&config, kernel, map_x, map_1, map_h, map_2, static_cast<const T*>(a.bias_1),
                           static_cast<const T*>(a.bias_2), share_1, share_2, gelu,
                           Rows<T>(a.residual, a.rows, a.width), Rows<T>(a.y, a.rows, a.width)),
        "cudaLaunchKernelEx");
}

}  // namespace

std::string v5_rows_can_implement(const Args& a) { return can_implement_few_rows(a, kTile); }

int64_t v5_rows_scratch_bytes(const Args& a) { return activation_bytes(a); }

void v5_rows(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const Rows<T> activation(a.scratch, a.rows, a.inner), kept(a.preactivation, a.rows, a.inner);
    with_major_of_weight(a.weight_transposed, [&](auto weight) {
      const auto with_gelu = [&](auto tanh) {
        a.preactivation == nullptr
            ? launch<weight.value, T>(a, GeluEpilogue<T, tanh.value, false, false>(activation, kept), stream)
            : launch<weight.value, T>(a, GeluEpilogue<T, tanh.value, false, true>(activation, kept), stream);
      };
      a.tanh ? with_gelu(std::true_type{}) : with_gelu(std::false_type{});
    });
  });
}

}  // namespace kf::KF_BACKEND::mlp
