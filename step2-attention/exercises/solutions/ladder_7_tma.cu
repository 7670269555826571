// Ladder 7: a tile that one thread loads. Two tiles of 64 rows by TMA; their product is plain.
//
//   kernel-fusion learn check ladder_7_tma
//   kernel-fusion simt -I include exercises/solutions/ladder_7_tma.cu
//   nvcc -O3 -arch=sm_90a -I include -I ../common/include exercises/solutions/ladder_7_tma.cu && ./a.out    on an H100
//
// An mbarrier counts what arrives in a phase: as many threads as mbarrier_init said, and the bytes that
// mbarrier_arrive_expect_tx announced. Who waits names the phase, 0 for the first. Its initial state must be seen by
// the copies (mbarrier_init_fence) and by all threads before anybody uses it. TMA moves the 16-byte chunks of a row, so
// that a column of them lies in all banks: byte b of the tile is at swizzled_offset(b, Swizzle::k128).
//
// Counted: global load requests, shared store requests
#include <step2/mbarrier.h>
#include <step2/tensor_map.h>
#include <step2/tma.h>

#include "../ladder.h"

__global__ void product(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                        Tile tile) {
  __shared__ __align__(1024) unsigned char q[64 * 128], k[64 * 128];
  __shared__ uint64_t barrier;
  // SOLUTION: one thread makes the barrier ready, announces the bytes and loads both tiles from (0, 0); all wait
  // | (void)barrier;
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
  // END
  for (int i = threadIdx.x; i < 64 * 64; i += blockDim.x) {
    float score = 0;
    for (int d = 0; d < 64; ++d) {
      float pair[2];
      // SOLUTION: pair = element d of row i / 64 of q, and of row i % 64 of k
      // | pair[0] = pair[1] = NAN;
      pair[0] = __half2float(*reinterpret_cast<__half*>(q + swizzled_offset(i / 64 * 128 + d * 2, Swizzle::k128)));
      pair[1] = __half2float(*reinterpret_cast<__half*>(k + swizzled_offset(i % 64 * 128 + d * 2, Swizzle::k128)));
      // END
      score += pair[0] * pair[1];
    }
    tile.out[i] = score;
  }
}

int main() {
  const auto scores = [](const Tile& tile) {
    const auto q_map = make_tensor_map<__half, 2>(tile.q, {64, 64}, {128}, {64, 64}, Swizzle::k128);
    const auto k_map = make_tensor_map<__half, 2>(tile.k, {64, 64}, {128}, {64, 64}, Swizzle::k128);
    product<<<1, 128>>>(q_map, k_map, tile);
  };
  return check_tile(scores, 64, 64, 64);
}
