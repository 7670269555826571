// linear v6_wgmma: a warpgroup multiplies out of shared memory, and TMA fills it
//
// Idea      Hopper's tensor cores take both operands from shared memory: wgmma multiplies 64 × 16 by 16 × 128 for four
//           warps, no register in between; one instruction in the place of sixteen a warp. One thread starts a copy of
//           a whole tile with TMA; an mbarrier says when it is there.
// Since v5  wgmma in place of mma.sync and ldmatrix, TMA in place of cp.async and its addresses. mma.sync reaches about
//           six tenths of what Hopper's tensor cores can do.
// Launch    grid ⌈rows/128⌉·⌈width/128⌉ in an order that shares tiles, block 256: two warpgroups of 64 × 128 outputs;
//           96 KB of shared memory, three stages of 128 × 64 and 128 × 64 elements
// Moves     (rows·depth + depth·width + rows·width + width)·sizeof(T) bytes at the least; 2·rows·depth·width FLOPs.
//           From the L2 cache as v5: 64 FLOP a byte. From shared memory a warpgroup reads 64 + 128 lines for 64 × 128
//           outputs: 43 FLOP a byte
// Limits    compute capability 9.0; float16 and bfloat16; x or weight transposed, not both. Rows in memory of a
//           multiple of 8 elements, x and weight at multiples of 16 bytes; rows, depth and width below 2³⁰. All threads
//           wait for each product before a stage is filled again
#include <step2/hopper_sums.h>
#include <step2/mbarrier.h>

#include "majors.h"
#include "operands.h"
#include "rungs.h"

namespace kf::KF_BACKEND::linear {
namespace {

constexpr int kWidth = 128, kStages = 3;
constexpr int kThreads = 2 * kWarpgroupSize;
using hopper::kDepth, hopper::kRows;

template <class Tile, class T>
struct Shared : hopper::Stages<Tile, T> {
  uint64_t full[kStages];
};

// Issues the load of an operand's 128 rows or columns of a stage, from `first` on. TMA copies boxes whose lines are 128
// bytes, so that it can swizzle them: one box where lines go along the depth, else two, side by side.
template <Major kMajor, class T>
__device__ __forceinline__ void load(T* to, const CUtensorMap* map, uint64_t* full, int first, int k) {
  if constexpr (kMajor == Major::kK) {
    tma_load(to, map, full, k, first);
  } else {
#pragma unroll
    for (int i = 0; i < 128; i += 64) tma_load(to + i * kDepth, map, full, first + i, k);
  }
}

// Issues sum += x · weight for one stage and a warpgroup's 64 rows, and closes the group.
template <Major kX, Major kWeight, class T>
__device__ __forceinline__ void multiply(float (&sum)[kWidth / 2], const T* x, const T* weight, bool accumulate) {
  // A descriptor says where an operand lies, and how. It counts in 16 bytes; the next 16 of the depth are 32 bytes
  // further in the same lines, or 16 lines.
  constexpr int kNextX = kX == Major::kK ? 32 >> 4 : 2048 >> 4,
                kNextWeight = kWeight == Major::kK ? 32 >> 4 : 2048 >> 4;
  const uint64_t of_x = matrix_descriptor(x, 0, 1024, Swizzle::k128);
  const uint64_t of_weight = matrix_descriptor(weight, kWeight == Major::kK ? 0 : 64 * kDepth * 2, 1024, Swizzle::k128);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kDepth / 16; ++i) {
    wgmma<kWidth, T, kX, kWeight>(sum, of_x + i * kNextX, of_weight + i * kNextWeight, accumulate || i > 0);
  }
  wgmma_commit();
}

template <class Tile, class T>
__global__ void __launch_bounds__(kThreads, 2)
    v6_wgmma_kernel(const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_weight,
                    const hopper::Schedule schedule, const T* __restrict__ bias, int width, const Rows<T> y) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<Tile, T>*>(memory);
  __shared__ __align__(4) T of_columns[kWidth];  // the bias
  const hopper::Schedule::Work work = schedule.find(blockIdx.x);
  const int row = work.row * kRows, column = work.column * kWidth;
  const auto issue_loads = [&](int k_tile) {  // by one thread
    const int stage = k_tile % kStages;
    mbarrier_arrive_expect_tx(&shared.full[stage], Tile::kStageBytes);
    load<Tile::kA>(shared.a[stage], &map_x, &shared.full[stage], row, k_tile * kDepth);
    load<Tile::kB>(shared.b[stage], &map_weight, &shared.full[stage], column, k_tile * kDepth);
  };
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) mbarrier_init(&shared.full[stage], 1);
    mbarrier_init_fence();
    for (int k_tile = 0; k_tile < min(kStages, schedule.k_tiles); ++k_tile) issue_loads(k_tile);
  }
  for (int c = threadIdx.x; c < kWidth; c += kThreads) {
    of_columns[c] = from_compute<T>(column + c < width ? bias_at(bias, column + c) : 0.0f);
  }
  __syncthreads();  // the barriers are there, and the bias

  const int group = warpgroup_of_block();
  float sum[kWidth / 2];
  for (int k_tile = 0; k_tile < schedule.k_tiles; ++k_tile) {
    const int stage = k_tile % kStages;
    mbarrier_wait(&shared.full[stage], k_tile / kStages % 2);
    multiply<Tile::kA, Tile::kB>(sum, shared.a[stage] + group * 64 * kDepth, shared.b[stage], k_tile > 0);
    wgmma_wait<0>();
    __syncthreads();  // both warpgroups have read the stage
    if (threadIdx.x == 0 && k_tile + kStages < schedule.k_tiles) issue_loads(k_tile + kStages);
  }
  // The sums leave through the stages, which nobody reads any more, so that lanes write whole vectors.
  const int warp = threadIdx.x / kWarpSize;
  using Parts = hopper::Parts<Tile::kSlices>;
  T* const staging = shared.a[0] + warp * hopper::kWarpRows * kWidth;
  hopper::Rounded<Tile, T> rounded;
  rounded.take(sum, of_columns);
  rounded.template put<Tile::kSlices>(staging, 0);
  __syncwarp();  // a warp reads what its lanes wrote
  for (int part = 0; part < 2 * Tile::kSlices; ++part) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = row + warp * hopper::kWarpRows + Parts::row_of(part, i), c = column + Parts::column_of(part);
      if (y.has(r, c)) y.store(r, c, load_packed(staging + Parts::offset_of(part, i)));
    }
  }
}

template <Major kX, Major kWeight, class T>
void launch(const Args& a, void* stream) {
  using Tile = hopper::Tile<kWidth, kX, kWeight, 1, kStages>;
  const auto kernel = v6_wgmma_kernel<Tile, T>;
  const hopper::Maps maps = hopper::maps_of<Tile, T>(product_of(a));
  const hopper::Schedule schedule = hopper::schedule_of<Tile>(product_of(a));
  allow_shared(kernel, sizeof(Shared<Tile, T>));
  kernel<<<static_cast<unsigned>(schedule.count()), kThreads, sizeof(Shared<Tile, T>), as_stream(stream)>>>(
      maps.a, maps.b, schedule, static_cast<const T*>(a.bias), static_cast<int>(a.width),
      Rows<T>(a.y, a.rows, a.width));
  check_launch();
}

}  // namespace

std::string v6_wgmma_can_implement(const Args& a) { return can_implement_majors(hopper::can_implement_product, a); }

void v6_wgmma(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    with_majors(a, [&](auto x, auto weight) { launch<x.value, weight.value, T>(a, stream); });
  });
}

}  // namespace kf::KF_BACKEND::linear
