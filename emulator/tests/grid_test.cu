// Blocks that wait for each other, and threads that wait for ever.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "errors.h"
#include "memory.h"

namespace cg = cooperative_groups;

namespace {

using test::expect_error;
using test::Memory;

__global__ void grid_prefix(int* data, int rounds) {
  const cg::grid_group grid = cg::this_grid();
  for (int round = 0; round < rounds; ++round) {
    const int i = static_cast<int>(grid.thread_rank()), n = static_cast<int>(grid.size());
    const int next = data[(i + 1) % n];
    grid.sync();
    data[i] += next;
    grid.sync();
  }
}

TEST(Grid, CooperativeLaunch) {
  constexpr int kBlocks = 24, kThreads = 64, n = kBlocks * kThreads;
  Memory<int> data(n);
  std::vector<int> expected(n);
  for (int i = 0; i < n; ++i) data[i] = expected[i] = i % 7;
  for (int round = 0; round < 5; ++round) {
    const std::vector<int> before = expected;
    for (int i = 0; i < n; ++i) expected[i] += before[(i + 1) % n];
  }
  int* pointer = data.get();
  int rounds = 5;
  void* arguments[] = {&pointer, &rounds};
  ASSERT_EQ(cudaLaunchCooperativeKernel((void*)grid_prefix, dim3(kBlocks), dim3(kThreads), arguments), cudaSuccess);
  EXPECT_TRUE(std::equal(data.begin(), data.end(), expected.begin()));
}

TEST(Grid, CooperativeByLaunchKernelEx) {
  Memory<int> data(4 * 32, 1);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config;
  config.gridDim = 4;
  config.blockDim = 32;
  config.attrs = &attribute;
  config.numAttrs = 1;
  ASSERT_EQ(cudaLaunchKernelEx(&config, grid_prefix, data.get(), 3), cudaSuccess);
  for (int value : data) EXPECT_EQ(value, 8);
}

TEST(Grid, TooLarge) {
  int resident = 0;
  ASSERT_EQ(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, grid_prefix, 1024, 0), cudaSuccess);
  EXPECT_EQ(resident, 2);
  int sms = 0;
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
  int* pointer = nullptr;
  int rounds = 0;
  void* arguments[] = {&pointer, &rounds};
  EXPECT_EQ(cudaLaunchCooperativeKernel(grid_prefix, sms * resident + 1, 1024, arguments),
            cudaErrorCooperativeLaunchTooLarge);
  cudaGetLastError();
}

__global__ void one_block_leaves() {
  if (blockIdx.x == 2) return;
  cg::this_grid().sync();
}

TEST(Grid, BlockThatLeaves) {
  expect_error([] { cudaLaunchCooperativeKernel(one_block_leaves, 4, 32, nullptr); },
               {"one_block_leaves", "grid.sync()", "grid_test.cu:", "block", "thread"});
}

TEST(Grid, SyncNeedsACooperativeLaunch) {
  expect_error([] { one_block_leaves<<<2, 32>>>(); }, {"one_block_leaves", "not cooperative"});
}

// A chain: each block waits for a flag of another, in the order of their numbers or against it.
template <bool kVolatile>
__global__ void wait_for_neighbour(int* flags, int step) {
  const int other = static_cast<int>(blockIdx.x) + step;
  volatile int* const words = flags;
  if (threadIdx.x == 0 && other >= 0 && other < static_cast<int>(gridDim.x)) {
    while ((kVolatile ? words[other] : atomicAdd(&flags[other], 0)) == 0) {
    }
  }
  __syncthreads();
  __threadfence();
  if (threadIdx.x != 0) return;
  if (kVolatile) {
    words[blockIdx.x] = 1;
  } else {
    atomicExch(&flags[blockIdx.x], 1);
  }
}

TEST(Flags, EarlierOrLaterBlockOnAnyNumberOfThreads) {
  for (const int threads : {1, 2, 0}) {
    kf::simt::set_threads(threads);
    for (const int step : {-1, 1}) {
      Memory<int> flags(40);
      wait_for_neighbour<false><<<40, 64>>>(flags.get(), step);
      EXPECT_EQ(std::accumulate(flags.begin(), flags.end(), 0), 40);
    }
  }
  kf::simt::set_threads(0);
}

#ifndef KF_SIMT_TSAN  // to which volatile orders nothing
TEST(Flags, PolledThroughVolatile) {
  for (const int step : {-1, 1}) {
    Memory<int> flags(3);
    wait_for_neighbour<true><<<3, 32>>>(flags.get(), step);
    EXPECT_EQ(std::accumulate(flags.begin(), flags.end(), 0), 3);
  }
}

__global__ void wait_within_a_block(int* flag) {
  if (threadIdx.x == 0) {
    while (*static_cast<volatile int*>(flag) == 0) {
    }
  }
  if (threadIdx.x == 100) *static_cast<volatile int*>(flag) = 1;
}

TEST(Flags, VolatileWithinABlock) {
  kf::simt::set_schedule("forward");
  Memory<int> flag(1);
  wait_within_a_block<<<1, 128>>>(flag.get());
  kf::simt::set_schedule("");
  EXPECT_EQ(flag[0], 1);
}
#endif

// A lane a word, and a vote after each round: a warp of which some lane can always go on. The other warp must have its
// turn.
__global__ void poll_and_vote(int* words) {
  const int lane = threadIdx.x % 32;
  if (threadIdx.x >= 32) {
    atomicExch(words + lane, 1);
    return;
  }
  bool there = false;
  while (!__all_sync(0xffffffffu, there)) {
    unsigned value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(words + lane) : "memory");
    there = value == 1;
  }
}

TEST(Flags, PolledByAWarpThatVotes) {
  Memory<int> words(32);
  for (const char* schedule : {"forward", "reverse", "random:1"}) {
    for (int i = 0; i < 32; ++i) words[i] = 0;
    kf::simt::set_schedule(schedule);
    poll_and_vote<<<1, 64>>>(words.get());
    kf::simt::set_schedule("");
    EXPECT_EQ(words[31], 1);
  }
}

__global__ void spin_lock(int* lock, int* counter) {
  bool done = false;
  while (!done) {
    if (atomicCAS(lock, 0, 1) == 0) {
      __threadfence();
      *static_cast<volatile int*>(counter) += 1;
      __threadfence();
      atomicExch(lock, 0);
      done = true;
    }
  }
}

TEST(Flags, SpinLock) {
  Memory<int> lock(1), counter(1);
  kf::simt::set_threads(4);
  spin_lock<<<16, 64>>>(lock.get(), counter.get());
  kf::simt::set_threads(0);
  EXPECT_EQ(counter[0], 16 * 64);
}

__global__ void lost_flag(int* flag) {
  if (threadIdx.x == 3) {
    while (atomicAdd(flag, 0) == 0) {
    }
  }
  __syncthreads();
}

TEST(Spin, ThatNeverEndsIsAnError) {
  Memory<int> flag(1);
  expect_error([&] { lost_flag<<<3, 64>>>(flag.get()); }, {"lost_flag", "block (", "thread (3,0,0)", "polls"});
}

__global__ void never_ending(volatile int* flag) {
  if (threadIdx.x == 1) {
    while (*flag == 0) {
    }
  }
}

#ifndef KF_SIMT_TSAN
__global__ void all_never_ending(volatile int* flag) {
  while (*flag == 0) {
  }
}
#endif

__global__ void never_ending_without_reading(int* out) {
  for (unsigned x = threadIdx.x;; x = x * 3 + 1) *static_cast<volatile int*>(out) = static_cast<int>(x);
}

TEST(Spin, WithoutAnyCallIsAnError) {
  Memory<int> flag(1);
  expect_error([&] { never_ending<<<2, 32>>>(flag.get()); },
               {"never_ending", "block (", "thread (1,0,0)", "polls memory that no thread changes"});
#ifndef KF_SIMT_TSAN  // under which a thread is rarely met outside of the detector, where it may be interrupted
  expect_error([&] { all_never_ending<<<2, 64>>>(flag.get()); }, {"all_never_ending"});
#endif
  kf::simt::set_watchdog(-1, 0.3);
  expect_error([&] { never_ending_without_reading<<<1, 2>>>(flag.get()); }, {"never_ending_without_reading"});
  kf::simt::set_watchdog(-1, -1);
}

__global__ void endless_barriers(volatile int* flag) {
  do {
    __syncthreads();
  } while (*flag == 0);
}

TEST(Spin, ThroughBarriersIsAnErrorInTheEnd) {
  kf::simt::set_watchdog(-1, 0.02);
  Memory<int> flag(1);
  expect_error([&] { endless_barriers<<<1, 32>>>(flag.get()); }, {"endless_barriers", "no block has ended"});
  kf::simt::set_watchdog(-1, -1);
}

__global__ void slow(float* out, int rounds) {
  float x = 1.0f;
  for (int i = 0; i < rounds; ++i) x = x * 1.0000001f + 0.5f;
  out[blockIdx.x * blockDim.x + threadIdx.x] = x;
}

TEST(Spin, SlowIsNotEndless) {
  kf::simt::set_watchdog(0.2, 10);
  Memory<float> out(4 * 2);
  slow<<<4, 2>>>(out.get(), 200000000 / 4);
  kf::simt::set_watchdog(-1, -1);
  for (float x : out) EXPECT_EQ(x, out[0]);
}

__global__ void groups(int* out) {
  const cg::thread_block block = cg::this_thread_block();
  const auto tile = cg::tiled_partition<8>(block);
  const int rank = static_cast<int>(tile.thread_rank());
  int ok = tile.size() == 8 && rank == static_cast<int>(threadIdx.x % 8);
  ok += tile.meta_group_rank() == threadIdx.x / 8 && tile.meta_group_size() == blockDim.x / 8;
  ok += tile.shfl(rank * 2, 3) == 6;
  ok += tile.shfl_down(rank, 2) == (rank < 6 ? rank + 2 : rank);
  ok += tile.shfl_up(rank, 1) == (rank > 0 ? rank - 1 : 0);
  ok += tile.shfl_xor(rank, 5) == (rank ^ 5);
  ok += tile.ballot(rank < 2) == 3u;
  ok += tile.any(rank == 7) && !tile.all(rank == 7);
  ok += cg::reduce(tile, rank, cg::plus<int>()) == 28;
  ok += cg::reduce(tile, rank, cg::greater<int>()) == 7;
  block.sync();
  tile.sync();
  if (threadIdx.x % 3 == 0) {
    const cg::coalesced_group here = cg::coalesced_threads();
    ok += cg::reduce(here, 1, cg::plus<int>()) == static_cast<int>(here.size());
    ok += here.shfl(static_cast<int>(threadIdx.x), 0) % 32 < 3;
  } else {
    ok += 2;
  }
  out[threadIdx.x] = ok;
}

TEST(Groups, TilesAndCoalescedThreads) {
  Memory<int> out(64);
  groups<<<1, 64>>>(out.get());
  for (int ok : out) EXPECT_EQ(ok, 12);
}

}  // namespace
