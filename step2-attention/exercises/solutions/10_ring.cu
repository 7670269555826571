// Exercise 10: a warp that loads, a warp that computes, and between them a ring of stages with two barriers each.
//
//   kernel-fusion learn check 10_ring
//   kernel-fusion simt -I include exercises/solutions/10_ring.cu
//   nvcc -O3 -arch=sm_90 -I include -I ../common/include exercises/solutions/10_ring.cu && ./a.out        with an H100
//
// Counted: global load sectors, barriers
#include <kf/exercise.h>
#include <step2/mbarrier.h>
#include <step2/tma.h>

using namespace kf::KF_BACKEND;

constexpr int kTile = 128, kStages = 3;  // numbers of a tile

// sums[tile] is the sum of a tile's numbers. Warp 0 loads, by one lane; warp 1 adds up.
//   full[s]   one arrival, with the tile's bytes: the tile of stage s is there
//   empty[s]  32 arrivals: the consumer's lanes have released stage s
// Stage s holds the tiles s, s + kStages, … A barrier's phase ends each time its arrivals have come. mbarrier_wait(b,
// p) returns when the phase of parity p has ended; of a barrier that is fresh, that of parity 1 counts as ended.
__global__ void sum_tiles(const float* x, float* sums, int tiles) {
  __shared__ alignas(128) float ring[kStages][kTile];
  __shared__ uint64_t full[kStages], empty[kStages];
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) mbarrier_init(&full[s], 1), mbarrier_init(&empty[s], 32);
    mbarrier_init_fence();
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  if (threadIdx.x / 32 == 0) {
    for (int tile = 0; lane == 0 && tile < tiles; ++tile) {
      const int s = tile % kStages;
      // SOLUTION: wait until stage s is empty, announce the bytes, and start the copy with bulk_load
      // | (void)s;
      mbarrier_wait(&empty[s], tile / kStages % 2 ^ 1);
      mbarrier_arrive_expect_tx(&full[s], sizeof ring[s]);
      bulk_load(ring[s], x + tile * kTile, sizeof ring[s], &full[s]);
      // END
    }
  } else {
    for (int tile = 0; tile < tiles; ++tile) {
      const int s = tile % kStages;
      float sum = 0;
      // SOLUTION: wait until stage s is full, add up, and release it
      // | (void)s;
      mbarrier_wait(&full[s], tile / kStages % 2);
      for (int i = lane; i < kTile; i += 32) sum += ring[s][i];
      mbarrier_arrive(&empty[s]);
      // END
      for (int away = 16; away > 0; away /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, away);
      if (lane == 0) sums[tile] = sum;
    }
  }
}

int main() {
  for (const int tiles : {1, 3, 4, 20}) {
    std::vector<float> x(tiles * kTile), sums(tiles, NAN);
    for (int i = 0; i < tiles * kTile; ++i) x[i] = static_cast<float>(i / kTile * 10 + i % 7);
    const OnGpu<float> gpu_x(x), gpu_sums(sums);
    sum_tiles<<<1, 64>>>(gpu_x.data, gpu_sums.data, tiles);
    CHECK(cudaGetLastError());
    gpu_sums.read(sums);
    for (int tile = 0; tile < tiles; ++tile) {
      float expected = 0;
      for (int i = 0; i < kTile; ++i) expected += x[tile * kTile + i];
      if (sums[tile] == expected) continue;  // whole numbers: exact in any order
      std::printf("WRONG: %d tiles: the sum of tile %d is %g, must be %g\n", tiles, tile, sums[tile], expected);
      return 1;
    }
  }
  std::printf("all right\n");
  return 0;
}
