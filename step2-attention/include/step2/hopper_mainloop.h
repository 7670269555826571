// What fills a stage of a product on Hopper, and what multiplies it: linear's v6 has the same for one block, written
// out.
#pragma once

#include <step2/hopper_tile.h>
#include <step2/pipeline.h>

namespace kf::KF_BACKEND::hopper {

// Issues the loads of one stage: by one thread. row and column are the block's own, k is where the depth begins.
template <class Tile, class Shared>
__device__ __forceinline__ void issue_loads(Shared& shared, int stage, const CUtensorMap* map_a,
                                            const CUtensorMap* map_b, int row, int column, int k, int rank) {
  uint64_t* const full = &shared.pipe.full[stage];
  if constexpr (Tile::kA == Major::kK) {
    tma_load(shared.a[stage], map_a, full, k, row);
  } else {
#pragma unroll
    for (int i = 0; i < kRows; i += 64) tma_load(shared.a[stage] + i * kDepth, map_a, full, row + i, k);
  }
  const auto load_b = [&](int offset, int x, int y) {
    if constexpr (Tile::kBlocks == 1) {
      tma_load(shared.b[stage] + offset, map_b, full, x, y);
    } else {
      tma_load_multicast(shared.b[stage] + offset, map_b, full, (1 << Tile::kBlocks) - 1, x, y);
    }
  };
  if constexpr (Tile::kB == Major::kK) {  // rows of 64 along the depth: a block of the cluster loads some of them
    constexpr int kOwn = Tile::kWidth / Tile::kBlocks;
    load_b(rank * kOwn * kDepth, k, column + rank * kOwn);
  } else {  // boxes of 64 columns: some rows of each
    constexpr int kOwn = kDepth / Tile::kBlocks;
#pragma unroll
    for (int i = 0; i < Tile::kWidth; i += 64) load_b(i * kDepth + rank * kOwn * 64, column + i, k + rank * kOwn);
  }
}

// Issues sum += a · b for one stage and a consumer's 64 rows, and closes the group.
template <class Tile, class T>
__device__ __forceinline__ void multiply(float (&sum)[Tile::kWidth / 2], const T* a, const T* b, bool accumulate) {
  // Descriptors count in 16 bytes: the next 16 of the depth, see step2/wgmma.h.
  constexpr int kNextA = Tile::kA == Major::kK ? 32 >> 4 : 2048 >> 4;
  constexpr int kNextB = Tile::kB == Major::kK ? 32 >> 4 : 2048 >> 4;
  const uint64_t of_a = matrix_descriptor(a, 0, 1024, Swizzle::k128);
  const uint64_t of_b = matrix_descriptor(b, Tile::kB == Major::kK ? 0 : 64 * kDepth * 2, 1024, Swizzle::k128);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kDepth / 16; ++i) {
    wgmma<Tile::kWidth, T, Tile::kA, Tile::kB>(sum, of_a + i * kNextA, of_b + i * kNextB, accumulate || i > 0);
  }
  wgmma_commit();
}

}  // namespace kf::KF_BACKEND::hopper
