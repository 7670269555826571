// Clusters: blocks that see each other's shared memory. And PTX's numbered barriers of a block.
#include <gtest/gtest.h>

#include "errors.h"
#include "memory.h"

namespace {

using kf::simt::CallSite;
using test::expect_error;
using test::Memory;

__device__ void cluster_sync() {
  kf::simt::cluster_arrive(CallSite::here());
  kf::simt::cluster_wait(CallSite::here());
}

// Each block adds what all blocks of its cluster hold, and then writes into its neighbour.
__global__ void __cluster_dims__(4, 1, 1) add_and_pass_on(int* sums, int* passed) {
  __shared__ int value, mailbox[32];
  extern __shared__ int dynamic[];
  const unsigned rank = kf::simt::kf_cluster_rank(), size = kf::simt::kf_cluster_size();
  if (threadIdx.x == 0) value = blockIdx.x;
  dynamic[threadIdx.x] = 100 * blockIdx.x + threadIdx.x;
  cluster_sync();
  int sum = 0;
  for (unsigned r = 0; r < size; ++r) {
    sum += *static_cast<int*>(kf::simt::map_shared_rank(&value, r));
    sum += *static_cast<int*>(kf::simt::map_shared_rank(&dynamic[threadIdx.x], r));
  }
  const unsigned address =
      kf::simt::map_shared_rank(kf::simt::kf_shared_address(&mailbox[threadIdx.x]), (rank + 1) % size);
  *static_cast<int*>(kf::simt::kf_shared_pointer(address)) = blockIdx.x;
  cluster_sync();
  sums[blockIdx.x * blockDim.x + threadIdx.x] = sum;
  passed[blockIdx.x * blockDim.x + threadIdx.x] = mailbox[threadIdx.x];
}

TEST(Cluster, SharedMemoryOfOtherBlocks) {
  constexpr int kBlocks = 24, kThreads = 32;
  Memory<int> sums(kBlocks * kThreads), passed(kBlocks * kThreads);
  add_and_pass_on<<<kBlocks, kThreads, kThreads * sizeof(int)>>>(sums.get(), passed.get());
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  for (int i = 0; i < kBlocks * kThreads; ++i) {
    const int first = i / kThreads / 4 * 4, t = i % kThreads, block = i / kThreads;
    EXPECT_EQ(sums[i], 101 * (4 * first + 6) + 4 * t) << i;
    EXPECT_EQ(passed[i], first + (block - first + 3) % 4) << i;
  }
}

__global__ void where_am_i(uint3* index, uint3* inner, unsigned* rank) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  index[block] = kf::simt::kf_cluster_index();
  inner[block] = kf::simt::kf_cluster_block_index();
  rank[block] = kf::simt::kf_cluster_rank();
}

// Each thread hands a number to its neighbour in the block, over and over.
__global__ void pass_round(int* got) {
  __shared__ int held[2][128];
  int mine = static_cast<int>(threadIdx.x);
  for (int round = 0; round < 5; ++round) {
    held[round % 2][threadIdx.x] = mine;
    cluster_sync();
    mine = held[round % 2][(threadIdx.x + 33) % blockDim.x];
  }
  got[blockIdx.x * blockDim.x + threadIdx.x] = mine;
}

TEST(Cluster, ALoneBlockIsAClusterOfItsOwn) {
  constexpr int kBlocks = 9, kThreads = 128;
  Memory<int> got(kBlocks * kThreads);
  pass_round<<<kBlocks, kThreads>>>(got.get());
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  for (int i = 0; i < kBlocks * kThreads; ++i) EXPECT_EQ(got[i], (i + 5 * 33) % kThreads) << i;
}

__global__ void half_of_a_lone_block(int* got) {
  if (threadIdx.x % 2 == 1) return;
  __shared__ int held[128];
  held[threadIdx.x] = static_cast<int>(threadIdx.x);
  cluster_sync();
  got[threadIdx.x] = held[(threadIdx.x + 64) % blockDim.x];
}

TEST(Cluster, ThreadsOfALoneBlockThatHaveEndedAreNotWaitedFor) {
  constexpr int kThreads = 128;
  Memory<int> got(kThreads);
  half_of_a_lone_block<<<1, kThreads>>>(got.get());
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  for (int i = 0; i < kThreads; i += 2) EXPECT_EQ(got[i], (i + 64) % kThreads) << i;
}

__global__ void arrive_twice_in_a_lone_block() {
  kf::simt::cluster_arrive(CallSite::here());
  kf::simt::cluster_arrive(CallSite::here());
}

TEST(Cluster, ALoneBlockThatArrivesTwiceIsAnErrorAndTheNextLaunchIsNot) {
  expect_error([] { arrive_twice_in_a_lone_block<<<1, 32>>>(); }, {"arrives twice at the cluster's barrier"});
  Memory<int> got(128);
  pass_round<<<1, 128>>>(got.get());
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  for (int i = 0; i < 128; ++i) EXPECT_EQ(got[i], (i + 5 * 33) % 128) << i;
}

TEST(Cluster, IndicesInThreeDimensions) {
  Memory<uint3> index(6 * 4 * 2), inner(6 * 4 * 2);
  Memory<unsigned> rank(6 * 4 * 2);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = 3;
  attribute.val.clusterDim.y = 2;
  attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(6, 4, 2);
  config.blockDim = dim3(1);
  config.attrs = &attribute;
  config.numAttrs = 1;
  for (const char* schedule : {"forward", "reverse", "random:3"}) {
    kf::simt::set_schedule(schedule);
    ASSERT_EQ(cudaLaunchKernelEx(&config, where_am_i, index.get(), inner.get(), rank.get()), cudaSuccess);
    for (unsigned z = 0; z < 2; ++z) {
      for (unsigned y = 0; y < 4; ++y) {
        for (unsigned x = 0; x < 6; ++x) {
          const unsigned block = x + 6 * (y + 4 * z);
          EXPECT_EQ(index[block].x, x / 3);
          EXPECT_EQ(index[block].y, y / 2);
          EXPECT_EQ(index[block].z, z);
          EXPECT_EQ(inner[block].x, x % 3);
          EXPECT_EQ(inner[block].y, y % 2);
          EXPECT_EQ(rank[block], x % 3 + 3 * (y % 2));
        }
      }
    }
  }
  kf::simt::set_schedule("");
}

__global__ void __cluster_dims__(16, 1, 1) large() {}
__global__ void __cluster_dims__(2, 1, 1) pair() {}

TEST(Cluster, RefusesWhatCudaRefuses) {
  large<<<16, 1>>>();
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidClusterSize);
  ASSERT_EQ(cudaFuncSetAttribute(large, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), cudaSuccess);
  large<<<16, 1>>>();
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  pair<<<3, 1>>>();
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidClusterSize);
}

__global__ void __cluster_dims__(2, 1, 1) one_stays_away(int* out) {
  if (blockIdx.x % 2 == 0) {
    cluster_sync();
    *out = 1;
  } else {
    while (atomicAdd(out, 0) == 0) {
    }
  }
}

TEST(Cluster, BarrierThatABlockDoesNotReachIsAnError) {
  Memory<int> out(1);
  kf::simt::set_watchdog(0.2, 10);
  expect_error([&] { one_stays_away<<<2, 32>>>(out.get()); },
               {"kernel one_stays_away", "block (", "thread (", "the launch can never end"});
  kf::simt::set_watchdog(-1, -1);
}

TEST(Cluster, ABlockThatWaitsForTheRestOfItsClusterDoesNotHideThatAllOthersWaitForEver) {
  Memory<int> out(1);
  kf::simt::set_watchdog(0.2, 10);
  kf::simt::set_threads(3);  // two for the first cluster, and one for half of the second
  expect_error([&] { one_stays_away<<<4, 32>>>(out.get()); }, {"kernel one_stays_away", "the launch can never end"});
  kf::simt::set_threads(0);
  kf::simt::set_watchdog(-1, -1);
}

__global__ void __cluster_dims__(2, 1, 1) exits_early(int* out) {
  if (blockIdx.x % 2 == 1) return;
  cluster_sync();
  out[threadIdx.x] = 1;
}

TEST(Cluster, BlocksThatHaveEndedAreNotWaitedFor) {
  Memory<int> out(32);
  exits_early<<<2, 32>>>(out.get());
  for (int value : out) EXPECT_EQ(value, 1);
}

__global__ void __cluster_dims__(2, 1, 1) arrives_twice() {
  kf::simt::cluster_arrive(CallSite::here());
  kf::simt::cluster_arrive(CallSite::here());
}

TEST(Cluster, ArrivingTwiceIsAnError) {
  expect_error([] { arrives_twice<<<2, 1>>>(); }, {"arrives twice", "cluster_test.cu:"});
}

__global__ void foreign_rank(int* out) {
  __shared__ int value;
  out[0] = *static_cast<int*>(kf::simt::map_shared_rank(&value, 1));
}

TEST(Cluster, RankOutsideIsAnError) {
  Memory<int> out(1);
  expect_error([&] { foreign_rank<<<1, 1>>>(out.get()); }, {"thread (0,0,0)", "block 1 of its cluster"});
}

__global__ void addresses(unsigned* out) {
  __shared__ alignas(128) float first[100];
  __shared__ char second[3];
  extern __shared__ float dynamic[];
  out[0] = kf::simt::kf_shared_address(dynamic);
  out[1] = kf::simt::kf_shared_address(dynamic + 1) - out[0];
  out[2] = kf::simt::kf_shared_address(first);
  out[3] = kf::simt::kf_shared_address(first + 99) - out[2];
  out[4] = kf::simt::kf_shared_address(second + 2);
  out[5] = kf::simt::kf_shared_pointer(out[2] + 8) == first + 2;
  out[6] = kf::simt::kf_shared_pointer(out[4]) == second + 2;
  out[7] = kf::simt::kf_shared_pointer(out[0] + 4) == dynamic + 1;
  out[8] = __isShared(first) && !__isShared(out) && __isGlobal(out);
}

TEST(SharedAddress, FitsIn18BitsAndComesBack) {
  Memory<unsigned> out(9);
  cudaFuncSetAttribute(addresses, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024);
  addresses<<<1, 1, 200 * 1024>>>(out.get());
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(out[0] % 1024, 0u);
  EXPECT_EQ(out[1], 4u);
  EXPECT_EQ(out[2] % 128, 0u);
  EXPECT_EQ(out[3], 396u);
  EXPECT_LT(out[4], 1u << 18);
  for (int i = 5; i < 9; ++i) EXPECT_EQ(out[i], 1u) << i;
}

__global__ void half_of_them() {
  if (threadIdx.x < 32) kf::simt::named_barrier(1, 64, true, CallSite::here());
}
__global__ void other_numbers() { kf::simt::named_barrier(1, threadIdx.x < 32 ? 64 : 96, true, CallSite::here()); }
__global__ void no_such_barrier() { kf::simt::named_barrier(16, 64, true, CallSite::here()); }

TEST(NamedBarrier, Errors) {
  expect_error([] { half_of_them<<<1, 64>>>(); }, {"waits at bar.sync", "cluster_test.cu:"});
  expect_error([] { other_numbers<<<1, 96>>>(); }, {"calls bar.sync", "for barrier 1 and ", "but another ("});
  expect_error([] { no_such_barrier<<<1, 64>>>(); }, {"numbered from 0 to 15"});
}

}  // namespace
