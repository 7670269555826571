// Launches that CUDA refuses, exceptions, and life after an error.
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <fstream>
#include <limits>
#include <stdexcept>
#include <thread>
#include <vector>

#include "errors.h"
#include "memory.h"

namespace {

using test::expect_error;
using test::Memory;

__global__ void set_one(int* out) { atomicExch(out, 1); }
__global__ void __launch_bounds__(128) bounded(int* out) { atomicExch(out, 1); }

TEST(LaunchError, AsCudaGivesThem) {
  Memory<int> out(1);
  const auto error_of = [&](dim3 grid, dim3 block, std::size_t shared = 0) {
    out[0] = 0;
    set_one<<<grid, block, shared>>>(out.get());
    const cudaError_t error = cudaPeekAtLastError();
    EXPECT_EQ(cudaGetLastError(), error);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    EXPECT_EQ(out[0], error == cudaSuccess ? 1 : 0);
    return error;
  };
  EXPECT_EQ(error_of(1, 1024), cudaSuccess);
  EXPECT_EQ(error_of(1, 1025), cudaErrorInvalidValue);
  EXPECT_EQ(error_of(1, dim3(32, 33)), cudaErrorInvalidValue);
  EXPECT_EQ(error_of(1, dim3(1, 1, 65)), cudaErrorInvalidValue);
  EXPECT_EQ(error_of(1, dim3(1, 1, 64)), cudaSuccess);
  EXPECT_EQ(error_of(1, 0), cudaErrorInvalidValue);
  EXPECT_EQ(error_of(0, 1), cudaErrorInvalidValue);
  EXPECT_EQ(error_of(dim3(1, 0), 1), cudaErrorInvalidValue);
  EXPECT_EQ(error_of(dim3(1, 65535), 1), cudaSuccess);
  EXPECT_EQ(error_of(dim3(1, 65536), 1), cudaErrorInvalidValue);
  EXPECT_EQ(error_of(dim3(1, 1, 65536), 1), cudaErrorInvalidValue);
  EXPECT_EQ(error_of(0x80000000u, 1), cudaErrorInvalidValue);
  EXPECT_EQ(error_of(1, 32, 48 * 1024), cudaSuccess);
  EXPECT_EQ(error_of(1, 32, 48 * 1024 + 1), cudaErrorInvalidValue);
  EXPECT_EQ(error_of(1, 32, 1 << 20), cudaErrorInvalidValue);
}

TEST(LaunchError, LaunchBounds) {
  Memory<int> out(1);
  bounded<<<1, 128>>>(out.get());
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  out[0] = 0;
  bounded<<<1, 129>>>(out.get());
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  EXPECT_EQ(out[0], 0);
  cudaFuncAttributes attributes;
  ASSERT_EQ(cudaFuncGetAttributes(&attributes, bounded), cudaSuccess);
  EXPECT_EQ(attributes.maxThreadsPerBlock, 128);
}

TEST(LaunchError, Names) {
  EXPECT_STREQ(cudaGetErrorName(cudaErrorInvalidConfiguration), "cudaErrorInvalidConfiguration");
  EXPECT_STREQ(cudaGetErrorString(cudaErrorInvalidConfiguration), "invalid configuration argument");
  EXPECT_STREQ(cudaGetErrorString(cudaSuccess), "no error");
}

struct Custom {
  int value;
};

__global__ void throw_custom(int* alive) {
  struct Guard {
    int* alive;
    explicit Guard(int* a) : alive(a) { atomicAdd(a, 1); }
    ~Guard() { atomicAdd(alive, -1); }
  };
  const Guard guard(alive);
  if (blockIdx.x == 1 && threadIdx.x == 40) throw Custom{static_cast<int>(threadIdx.x)};
}

__global__ void throw_while_others_wait() {
  if (threadIdx.x == 20) throw std::out_of_range("from a kernel");
  __syncthreads();
}

TEST(Exception, ReachesTheCallerUnchanged) {
  Memory<int> alive(1);
  try {
    throw_custom<<<2, 64>>>(alive.get());
    FAIL() << "no exception";
  } catch (const Custom& custom) {
    EXPECT_EQ(custom.value, 40);
  }
  EXPECT_EQ(alive[0], 0) << "the thread that threw was not unwound";
  try {
    throw_while_others_wait<<<4, 64>>>();
    FAIL() << "no exception";
  } catch (const std::out_of_range& error) {
    EXPECT_STREQ(error.what(), "from a kernel");
  }
}

__global__ void catches_its_own(int* out) {
  try {
    throw 5;
  } catch (int value) {
    out[threadIdx.x] = value;
  }
  __syncthreads();
}

TEST(Exception, CaughtInTheKernel) {
  Memory<int> out(64);
  catches_its_own<<<1, 64>>>(out.get());
  for (int value : out) EXPECT_EQ(value, 5);
}

__global__ void asserts(int limit) { assert(static_cast<int>(threadIdx.x) < limit); }

__global__ void traps() {
  if (threadIdx.x == 2) __trap();
}

TEST(Exception, AssertAndTrapNameTheThread) {
  asserts<<<1, 32>>>(32);
  expect_error([] { asserts<<<1, 32>>>(31); }, {"asserts", "thread (31,0,0)", "threadIdx.x", "error_test.cu:"});
  expect_error([] { traps<<<1, 32>>>(); }, {"thread (2,0,0)"});
}

__global__ void never_launched_from_a_kernel() { set_one<<<1, 1>>>(nullptr); }

TEST(Exception, KernelThatLaunches) { EXPECT_THROW((never_launched_from_a_kernel<<<1, 1>>>()), kf::simt::Error); }

#ifndef KF_SIMT_TSAN  // which keeps memory of its own for every thread, and cannot follow a fork
__global__ void barrier_after_exit(int* out) {
  __shared__ int value;
  if (threadIdx.x == 0) value = 3;
  if (threadIdx.x == 9 && out == nullptr) return;
  __syncthreads();
  out[threadIdx.x] = value;
}

// Bytes that malloc has given out, and bytes that are mapped. Resident pages would not do: a stack's stay with their
// worker once they have been written, and which worker writes how far, and when, is chance.
struct Held {
  long heap = 0, mapped = 0;
};

Held held() {
  long pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const struct mallinfo2 info = mallinfo2();
  return {static_cast<long>(info.uordblks + info.hblkhd), pages * sysconf(_SC_PAGESIZE)};
}

int os_threads() {
  std::ifstream status("/proc/self/status");
  std::string word;
  int count = 0;
  while (status >> word) {
    if (word == "Threads:") status >> count;
  }
  return count;
}

TEST(AfterAnError, TheRuntimeIsUsableAndLeaksNothing) {
  Memory<int> out(256);
  const auto round = [&] {
    EXPECT_THROW((barrier_after_exit<<<6, 256>>>(nullptr)), kf::simt::Error);
    EXPECT_THROW((throw_while_others_wait<<<6, 256>>>()), std::out_of_range);
    for (int& value : out) value = 0;
    barrier_after_exit<<<1, 256>>>(out.get());
    for (int value : out) EXPECT_EQ(value, 3);
  };
  for (int i = 0; i < 20; ++i) round();
  const int threads = os_threads();
  const int rounds = 100;  // of which each loses something, where there is a leak, in every stretch
  Held least{std::numeric_limits<long>::max(), std::numeric_limits<long>::max()};
  for (int stretch = 0; stretch < 8; ++stretch) {
    const Held before = held();
    for (int i = 0; i < rounds; ++i) round();
    const Held after = held();
    least.heap = std::min(least.heap, after.heap - before.heap);
    least.mapped = std::min(least.mapped, after.mapped - before.mapped);
  }
#ifndef __SANITIZE_ADDRESS__           // which keeps freed memory for a while
  EXPECT_LT(least.heap, rounds * 20);  // malloc takes no less than 32 bytes for anything
  EXPECT_LE(least.mapped, 0);
#else
  static_cast<void>(least);
#endif
  EXPECT_LE(os_threads(), threads + 1);
}

#endif

__global__ void sum_of_ones(int* out) { atomicAdd(out, __syncthreads_count(1) > 0); }

TEST(ManyLaunches, FromSeveralThreadsAtOnce) {
  std::vector<std::thread> threads;
  std::vector<int> sums(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t, &sums] {
      Memory<int> out(1);
      for (int i = 0; i < 50; ++i) sum_of_ones<<<5, 64>>>(out.get());
      sums[t] = out[0];
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int sum : sums) EXPECT_EQ(sum, 50 * 5 * 64);
}

#ifndef KF_SIMT_TSAN
TEST(Fork, ChildLaunchesOnItsOwnThreads) {
  Memory<int> out(1);
  kf::simt::set_threads(4);
  sum_of_ones<<<8, 64>>>(out.get());
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(1800);
    out[0] = 0;
    sum_of_ones<<<8, 64>>>(out.get());
    _exit(out[0] == 8 * 64 ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  kf::simt::set_threads(0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}
#endif

__global__ void deep(int* out, int depth) {
  volatile char frame[16 * 1024];
  frame[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = depth + frame[threadIdx.x];
}

__device__ int descend(volatile int* depth, int limit) {
  volatile char frame[200];
  frame[0] = static_cast<char>(*depth);
  if (*depth == limit) return frame[0];
  *depth = *depth + 1;
  return descend(depth, limit) + frame[0];
}
__global__ void recurses(int* out, int limit) {
  int depth = 0;
  __syncthreads();
  out[blockIdx.x * 32 + threadIdx.x] = threadIdx.x == 5 || limit < 10 ? descend(&depth, limit) : 0;
}

TEST(Stack, OverflowNamesTheThread) {
  Memory<int> out(4 * 32);
  for (int round = 0; round < 3; ++round) {  // on any OS thread, and again
    expect_error([&] { recurses<<<4, 32>>>(out.get(), 1 << 30); },
                 {"kernel recurses", "block (", "thread (5,0,0)", "has used up its stack of"});
    recurses<<<4, 32>>>(out.get(), 3);
  }
}

TEST(Stack, LargeFrames) {
  Memory<int> out(32);
  deep<<<1, 32>>>(out.get(), 1);
  for (int value : out) EXPECT_EQ(value, 2);
}

}  // namespace
