// Clusters: memory and mbarriers of other blocks, and loads for several of them.
#include <step2/cluster.h>
#include <step2/mbarrier.h>
#include <step2/tensor_map.h>
#include <step2/tma.h>

#include "ptx_test.h"

namespace kf::KF_BACKEND {
namespace {

using Cluster = On<901>;

template <class... Params, class... Args>
void launch_clusters(void (*kernel)(Params...), int cluster, int blocks, int shared, Args... args) {
  launch_in_clusters(kernel, cluster, blocks, 32, shared, nullptr, args...);
  finish();
}

// Each block adds up the numbers of all four, and gives its rank to the next one.
template <class T>
__global__ void cluster_kernel(const float* in, T* out) {
  __shared__ float mine[32];
  __shared__ T given[32];
  const uint32_t rank = cluster_rank_of_block(), blocks = cluster_blocks();
  mine[threadIdx.x] = in[blockIdx.x * 32 + threadIdx.x];
  cluster_sync();
  T sum = 0;
  for (uint32_t r = 0; r < blocks; ++r) sum += load_remote(remote_address(&mine[threadIdx.x], r));
  store_remote(remote_address(&given[threadIdx.x], (rank + 1) % blocks), sum + static_cast<T>(rank));
  cluster_sync();
  out[blockIdx.x * 32 + threadIdx.x] = given[threadIdx.x];
}

template <class T>
void check_reaching_into_other_blocks() {
  const Memory<float> in(8 * 32);
  const Memory<T> out(8 * 32);
  fill_whole(in, 10);
  launch_clusters(cluster_kernel<T>, 4, 8, 0, static_cast<const float*>(in.get()), out.get());
  for (int i = 0; i < 8 * 32; ++i) {
    const int first = i / 128 * 128, rank = i / 32 % 4;
    T expected = static_cast<T>((rank + 3) % 4);
    for (int r = 0; r < 4; ++r) expected += in[first + 32 * r + i % 32];
    ASSERT_EQ(out[i], expected) << "block " << i / 32 << ", thread " << i % 32;
  }
  print_checksum(out);
}

TEST_F(Cluster, ReachesIntoOtherBlocks) {
  check_reaching_into_other_blocks<float>();
  check_reaching_into_other_blocks<double>();
}

// Every thread of the cluster arrives at the barrier of rank 0, which then sends two numbers to each of the others.
template <class C>
__global__ void remote_barrier_kernel(C* out) {
  __shared__ uint64_t arrived, sent;
  __shared__ Pair<C> numbers;
  if (threadIdx.x == 0) {
    mbarrier_init(&arrived, 64);
    mbarrier_init(&sent, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_tx(&sent, sizeof(numbers));
  }
  cluster_sync();
  mbarrier_arrive_remote(&arrived, 0);
  if (cluster_rank_of_block() == 0) {
    mbarrier_wait_cluster(&arrived, 0);
    if (threadIdx.x < 2) {
      const C number = 5 + static_cast<C>(threadIdx.x);
      store_remote_async(remote_address(&numbers, threadIdx.x), Pair<C>{number, number * 10},
                         remote_address(&sent, threadIdx.x));
    }
  }
  mbarrier_wait_cluster(&sent, 0);
  out[blockIdx.x * 32 + threadIdx.x] = threadIdx.x % 2 == 0 ? numbers.first : numbers.second;
  cluster_sync();
}

template <class C>
void check_barriers_of_other_blocks() {
  const Memory<C> out(64);
  launch_clusters(remote_barrier_kernel<C>, 2, 2, 0, out.get());
  for (int i = 0; i < 64; ++i) {
    ASSERT_EQ(out[i], (i < 32 ? 5 : 6) * (i % 2 == 0 ? 1 : 10)) << "block " << i / 32 << ", thread " << i % 32;
  }
}

TEST_F(Cluster, ArrivesAtTheBarriersOfOtherBlocks) {
  check_barriers_of_other_blocks<float>();
  check_barriers_of_other_blocks<double>();
}

// Each block reads the other's numbers, 16 bytes at a time, and says so before the other overwrites them.
__global__ void leave_kernel(const float* in, float* out) {
  __shared__ __align__(16) float mine[128];
  __shared__ uint64_t left;
  const uint32_t other = 1 - cluster_rank_of_block();
  if (threadIdx.x == 0) {
    mbarrier_init(&left, 32);
    mbarrier_init_fence();
  }
  for (int i = 0; i < 4; ++i) mine[threadIdx.x * 4 + i] = in[blockIdx.x * 128 + threadIdx.x * 4 + i];
  cluster_sync();
  const float4 read = load_remote_4(remote_address(&mine[threadIdx.x * 4], other));
  mbarrier_arrive_remote_cta(&left, other);
  mbarrier_wait_cluster(&left, 0);
  for (int i = 0; i < 4; ++i) mine[threadIdx.x * 4 + i] = -1;
  const float values[4] = {read.x, read.y, read.z, read.w};
  for (int i = 0; i < 4; ++i) out[blockIdx.x * 128 + threadIdx.x * 4 + i] = values[i];
  cluster_sync();
}

TEST_F(Cluster, LeavesWhatItHasOnlyRead) {
  const Memory<float> in(4 * 128), out(4 * 128);
  fill_whole(in, 100);
  launch_clusters(leave_kernel, 2, 4, 0, static_cast<const float*>(in.get()), out.get());
  for (int i = 0; i < 4 * 128; ++i) ASSERT_EQ(out[i], in[i ^ 128]) << "block " << i / 128 << ", number " << i % 128;
  print_checksum(out);
}

// Rank 0 loads one tile for all blocks.
__global__ void multicast_kernel(const __grid_constant__ CUtensorMap map, uint32_t* out) {
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* const tile = aligned_shared(shared);
  __shared__ uint64_t ready;
  if (threadIdx.x == 0) {
    mbarrier_init(&ready, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_tx(&ready, 64 * 8 * 2);
  }
  cluster_sync();
  if (threadIdx.x == 0 && cluster_rank_of_block() == 0) tma_load_multicast(tile, &map, &ready, 0b1101, 8, 2);
  if (cluster_rank_of_block() != 1) mbarrier_wait(&ready, 0);
  for (uint32_t i = threadIdx.x; i < 256; i += 32) {
    out[blockIdx.x * 256 + i] = cluster_rank_of_block() != 1 ? reinterpret_cast<const uint32_t*>(tile)[i] : 0;
  }
  cluster_sync();
}

TEST_F(Cluster, LoadsOneTileForSeveralBlocks) {
  const Memory<uint16_t> tensor(128 * 16);
  fill_bits(tensor);
  const CUtensorMap map = make_tensor_map<uint16_t, 2>(tensor.get(), {128, 16}, {256}, {64, 8}, Swizzle::k128);
  const Memory<uint32_t> out(4 * 256);
  launch_clusters(multicast_kernel, 4, 4, 2048, map, out.get());
  for (uint32_t block = 0; block < 4; ++block) {
    const auto* const bits = reinterpret_cast<const uint16_t*>(out.get() + 256 * block);
    for (uint32_t i = 0; i < 512; ++i) {
      const uint16_t expected = block == 1 ? 0 : tensor[(2 + i / 64) * 128 + 8 + i % 64];
      ASSERT_EQ(bits[block == 1 ? i : swizzled_offset(2 * i, Swizzle::k128) / 2], expected)
          << "rank " << block << ", element " << i;
    }
  }
  print_checksum(out);
}

}  // namespace
}  // namespace kf::KF_BACKEND
