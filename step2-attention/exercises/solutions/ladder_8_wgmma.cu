// Ladder 8: the same product by a warpgroup, which reads both tiles where TMA left them.
//
//   kernel-fusion learn check ladder_8_wgmma
//   kernel-fusion simt -I include exercises/solutions/ladder_8_wgmma.cu
//   nvcc -O3 -arch=sm_90a -I include -I ../common/include exercises/solutions/ladder_8_wgmma.cu && ./a.out    on an
//   H100
//
// Begin with what you wrote in ladder_7. wgmma<64, __half>(d, a, b, accumulate) multiplies 64 × 16 by 16 × 64; a and b
// are matrix_descriptor(start, 0, 1024, Swizzle::k128): eight rows of 128 bytes are 1024 bytes, and 16 elements further
// along the depth `start` is 32 bytes further. wgmma_fence() comes before the products, wgmma_commit() and
// wgmma_wait<0>() after them. d[i] of a thread is row 16·warp + g + 8·(i / 2 % 2), column 8·(i / 4) + 2t + i % 2.
//
// Counted: global load requests, shared load requests
#include <step2/mbarrier.h>
#include <step2/tensor_map.h>
#include <step2/wgmma.h>

#include "../ladder.h"

__global__ void product(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                        Tile tile) {
  __shared__ __align__(1024) unsigned char q[64 * 128], k[64 * 128];
  __shared__ uint64_t barrier;
  // SOLUTION: load the tiles, multiply them in four products, store d
  // | (void)q, (void)k, (void)barrier;
  if (threadIdx.x == 0) {
    mbarrier_init(&barrier, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(&barrier, sizeof q + sizeof k);
    tma_load(q, &q_map, &barrier, 0, 0);
    tma_load(k, &k_map, &barrier, 0, 0);
  }
  mbarrier_wait(&barrier, 0);
  float d[32];
  wgmma_fence();
  for (int slice = 0; slice < 4; ++slice) {
    wgmma<64, __half>(d, matrix_descriptor(q + 32 * slice, 0, 1024, Swizzle::k128),
                      matrix_descriptor(k + 32 * slice, 0, 1024, Swizzle::k128), slice > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  for (int i = 0; i < 32; ++i) tile.out[(row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
  // END
}

int main() {
  const auto scores = [](const Tile& tile) {
    const auto q_map = make_tensor_map<__half, 2>(tile.q, {64, 64}, {128}, {64, 64}, Swizzle::k128);
    const auto k_map = make_tensor_map<__half, 2>(tile.k, {64, 64}, {128}, {64, 64}, Swizzle::k128);
    product<<<1, 128>>>(q_map, k_map, tile);
  };
  return check_tile(scores, 64, 64, 64);
}
