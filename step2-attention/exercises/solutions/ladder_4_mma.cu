// Ladder 4: one product on tensor cores, 16 × 8 scores of depth 16, by one warp.
//
//   kernel-fusion learn check ladder_4_mma
//   kernel-fusion simt -I include exercises/solutions/ladder_4_mma.cu
//   nvcc -O3 -arch=native -I include -I ../common/include exercises/solutions/ladder_4_mma.cu && ./a.out    with a GPU
//
// mma_m16n8k16 multiplies what 32 lanes hold. With g = lane / 4 and t = lane % 4, a register holds two neighbours, the
// first in its lower half:
//   a[0]: row g, columns 2t and 2t + 1    a[1]: row g + 8    a[2]: row g, columns 2t + 8, 2t + 9    a[3]: both
//   b[0]: rows 2t and 2t + 1 of column g  b[1]: rows 2t + 8, 2t + 9      d[0], d[1]: row g, columns 2t, 2t + 1
//                                                                        d[2], d[3]: row g + 8
// Column g of b is key g, so its rows are neighbours in memory, too.
//
// Counted: global load requests, shared load requests
#include <step2/mma.h>

#include "../ladder.h"

using namespace kf::KF_BACKEND;

__global__ void product(Tile tile) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  float d[4] = {};
  // SOLUTION: load a and b, two numbers at once; multiply; store d
  // | (void)g, (void)t, (void)d;
  const auto pair = [](const __half* row, int column) { return *reinterpret_cast<const uint32_t*>(row + column); };
  const __half *upper = tile.q + g * tile.depth, *lower = upper + 8 * tile.depth, *key = tile.k + g * tile.depth;
  const uint32_t a[4] = {pair(upper, 2 * t), pair(lower, 2 * t), pair(upper, 2 * t + 8), pair(lower, 2 * t + 8)};
  const uint32_t b[2] = {pair(key, 2 * t), pair(key, 2 * t + 8)};
  mma_m16n8k16<__half>(d, a, b);
  for (int e = 0; e < 4; ++e) tile.out[(g + e / 2 * 8) * tile.columns + 2 * t + e % 2] = d[e];
  // END
}

int main() {
  return check_tile([](const Tile& tile) { product<<<1, 32>>>(tile); }, 16, 8, 16);
}
