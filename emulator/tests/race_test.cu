// Races, each beside its correct twin. Under preset simt-tsan the wrong one must be reported in CUDA's words, with both
// threads and both lines; the right one must pass there in silence, and everywhere with the right result.
#include <cooperative_groups.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "errors.h"
#include "memory.h"

namespace {

using test::Memory;
namespace cg = cooperative_groups;

// "race_test.cu:N" of the line that is marked so in this file.
std::string line_of(const std::string& mark) {
  std::ifstream file(__FILE__);
  std::string text;
  for (int number = 1; std::getline(file, text); ++number) {
    const std::string end = "// " + mark;
    if (text.size() > end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0) {
      return "race_test.cu:" + std::to_string(number);
    }
  }
  return "no line is marked " + mark;
}

// Without the race detector the wrong kernels would only give some result.
template <class Launch>
void expect_race(Launch launch, std::initializer_list<std::string> parts) {
#ifdef KF_SIMT_TSAN
  const std::string text = test::error_of(launch);
  test::expect_parts(text, parts);
  for (const char* foreign : {"pthread", "mutex", "ThreadSanitizer", "main thread", "kf_simt"}) {
    EXPECT_EQ(text.find(foreign), std::string::npos) << "`" << foreign << "` in: " << text;
  }
#else
  static_cast<void>(launch);
  static_cast<void>(parts);
#endif
}

template <bool kRight>
__global__ void neighbours(int* out) {
  __shared__ int tile[128];
  tile[threadIdx.x] = threadIdx.x;  // fills the tile
  if (kRight) __syncthreads();
  out[threadIdx.x] = tile[(threadIdx.x + 32) % 128];  // reads the tile
}

TEST(Race, BetweenWarpsInSharedMemory) {
  Memory<int> out(128);
  neighbours<true><<<1, 128>>>(out.get());
  for (int i = 0; i < 128; ++i) EXPECT_EQ(out[i], (i + 32) % 128);
  expect_race([&] { neighbours<false><<<1, 128>>>(out.get()); },
              {"kernel neighbours", "race in shared memory, `tile`", "block (0,0,0) thread (",
               line_of("fills the tile"), line_of("reads the tile"), "No __syncthreads() is between them"});
}

template <bool kRight>
__global__ void halves(int* out) {
  __shared__ int sums[256];
  sums[threadIdx.x] = 1;
  __syncthreads();
  for (int distance = 128; distance > 0; distance /= 2) {
    if (threadIdx.x < distance) sums[threadIdx.x] += sums[threadIdx.x + distance];  // adds the halves
    if (kRight) __syncthreads();
  }
  if (threadIdx.x == 0) *out = sums[0];
}

TEST(Race, InALoop) {
  Memory<int> out(1);
  halves<true><<<1, 256>>>(out.get());
  EXPECT_EQ(out[0], 256);
  expect_race([&] { halves<false><<<1, 256>>>(out.get()); },
              {"race in shared memory, `sums`", line_of("adds the halves"), "__syncthreads() is between them"});
}

template <bool kRight>
__global__ void reused(int* out) {
  extern __shared__ int buffer[];
  int sum = 0;
  for (int round = 0; round < 3; ++round) {
    buffer[threadIdx.x] = round;  // fills it again
    __syncthreads();
    sum += buffer[(threadIdx.x + 40) % 64];  // reads it
    if (kRight) __syncthreads();
  }
  out[threadIdx.x] = sum;
}

TEST(Race, BeforeABufferIsUsedAgain) {
  Memory<int> out(64);
  reused<true><<<1, 64, 64 * sizeof(int)>>>(out.get());
  EXPECT_EQ(out[0], 3);
  expect_race([&] { reused<false><<<1, 64, 64 * sizeof(int)>>>(out.get()); },
              {"race in dynamic shared memory", line_of("fills it again"), line_of("reads it")});
}

// Lanes of one warp. A shuffle moves a value but orders no memory.
template <bool kRight>
__global__ void in_a_warp(int* out) {
  __shared__ int lanes[32];
  lanes[threadIdx.x] = threadIdx.x;  // each lane writes
  if (kRight) {
    __syncwarp();
  } else {
    __shfl_sync(0xffffffffu, 1, 0);
  }
  out[threadIdx.x] = lanes[31 - threadIdx.x];  // and reads another's
}

TEST(Race, WithinAWarp) {
  Memory<int> out(32);
  in_a_warp<true><<<1, 32>>>(out.get());
  for (int i = 0; i < 32; ++i) EXPECT_EQ(out[i], 31 - i);
  expect_race([&] { in_a_warp<false><<<1, 32>>>(out.get()); },
              {"`lanes`", line_of("each lane writes"), line_of("and reads another's"),
               "No __syncwarp() or __syncthreads() is between them"});
}

// The lanes that meet are not those that exchange.
template <bool kRight>
__global__ void half_warps(int* out) {
  __shared__ int lanes[32];
  const unsigned half = threadIdx.x < 16 ? 0xffffu : 0xffff0000u;
  lanes[threadIdx.x] = threadIdx.x;
  __syncwarp(kRight ? 0xffffffffu : half);
  out[threadIdx.x] = lanes[31 - threadIdx.x];
}

TEST(Race, MaskTooSmall) {
  Memory<int> out(32);
  half_warps<true><<<1, 32>>>(out.get());
  EXPECT_EQ(out[0], 31);
  expect_race([&] { half_warps<false><<<1, 32>>>(out.get()); }, {"`lanes`", "No __syncwarp()"});
}

template <bool kRight>
__global__ void in_global(int* data) {
  int* const mine = data + blockIdx.x * blockDim.x;
  mine[threadIdx.x] = 1;  // to global memory
  if (kRight) __syncthreads();
  const int got = mine[blockDim.x - 1 - threadIdx.x];  // from global memory
  __syncthreads();
  mine[threadIdx.x] += got;
}

TEST(Race, InGlobalMemoryWithinABlock) {
  Memory<int> data(256);
  in_global<true><<<2, 128>>>(data.get());
  for (int value : data) EXPECT_EQ(value, 2);
  expect_race([&] { in_global<false><<<2, 128>>>(data.get()); },
              {"race in global memory", line_of("to global memory"), line_of("from global memory"),
               "No __syncthreads() is between them"});
}

// Neighbouring blocks write one element too many.
template <bool kRight>
__global__ void overlapping(int* data, int each) {
  const int begin = blockIdx.x * each, end = begin + each + (kRight ? 0 : 1);
  for (int i = begin + threadIdx.x; i < end; i += blockDim.x) data[i] = i;  // of its part
}

TEST(Race, BetweenBlocks) {
  Memory<int> data(8 * 33 + 1);
  overlapping<true><<<8, 32>>>(data.get(), 33);
  for (int i = 0; i < 8 * 33; ++i) EXPECT_EQ(data[i], i);
  expect_race([&] { overlapping<false><<<8, 32>>>(data.get(), 33); },
              {"race in global memory", line_of("of its part"), "thread (0,0,0)", "thread (1,0,0)",
               "Nothing orders blocks but a flag with __threadfence() on both sides"});
}

__device__ int last_ticket = 0;

// One block hands data to another through a flag.
template <bool kRight>
__global__ void handed_over(int* data, int* flag) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    *data = 42;  // before the flag
    if (kRight) __threadfence();
    atomicExch(flag, 1);
  } else {
    while (atomicAdd(flag, 0) == 0) {
    }
    if (kRight) __threadfence();
    data[1] = *data;  // after the flag
  }
}

TEST(Race, FlagWithoutFence) {
  Memory<int> data(2), flag(1);
  handed_over<true><<<2, 32>>>(data.get(), flag.get());
  EXPECT_EQ(data[1], 42);
  flag[0] = 0;
  expect_race([&] { handed_over<false><<<2, 32>>>(data.get(), flag.get()); },
              {"race in global memory", line_of("before the flag"), line_of("after the flag"), "block (0,0,0)",
               "block (1,0,0)", "__threadfence() on both sides"});
}

// The block that comes last adds up what all have written.
template <bool kRight>
__global__ void last_adds(int* parts, int* out) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = 1;
    if (kRight) __threadfence();
    last = atomicAdd(&last_ticket, 1) == static_cast<int>(gridDim.x) - 1;
    if (kRight) __threadfence();
  }
  __syncthreads();
  if (!last || threadIdx.x != 1) return;
  for (unsigned i = 0; i < gridDim.x; ++i) *out += parts[i];
  atomicExch(&last_ticket, 0);
}

TEST(Race, LastBlockWithoutFence) {
  Memory<int> parts(8), out(1);
  last_adds<true><<<8, 32>>>(parts.get(), out.get());
  EXPECT_EQ(out[0], 8);
  expect_race([&] { last_adds<false><<<8, 32>>>(parts.get(), out.get()); }, {"race in global memory"});
  last_ticket = 0;
}

template <bool kRight>
__global__ void across_the_grid(int* data, int* out) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x, all = gridDim.x * blockDim.x;
  for (int round = 0; round < 3; ++round) {
    data[i] = round;
    cg::this_grid().sync();
    out[i] = data[all - 1 - i];
    if (kRight) cg::this_grid().sync();
  }
}

TEST(Race, GridSyncMissing) {
  Memory<int> data(128), out(128);
  int *d = data.get(), *o = out.get();
  void* arguments[] = {&d, &o};
  ASSERT_EQ(cudaLaunchCooperativeKernel(across_the_grid<true>, 4, 32, arguments), cudaSuccess);
  for (int value : out) EXPECT_EQ(value, 2);
  expect_race([&] { cudaLaunchCooperativeKernel(across_the_grid<false>, 4, 32, arguments); },
              {"race in global memory", "grid.sync()"});
}

// A block reads its neighbour's shared memory before, or after, all have written theirs.
template <bool kRight>
__global__ void __cluster_dims__(2, 1, 1) across_a_cluster(int* out) {
  __shared__ int mine;
  const cg::cluster_group cluster = cg::this_cluster();
  if (threadIdx.x == 0) mine = blockIdx.x;  // its own block's
  if (kRight) cluster.sync();
  if (threadIdx.x == 0) out[blockIdx.x] = *cluster.map_shared_rank(&mine, 1 - cluster.block_rank());  // the other's
  cluster.sync();
}

TEST(Race, ClusterBarrierMissing) {
  Memory<int> out(2);
  across_a_cluster<true><<<2, 32>>>(out.get());
  EXPECT_EQ(out[0], 1);
  EXPECT_EQ(out[1], 0);
  expect_race([&] { across_a_cluster<false><<<2, 32>>>(out.get()); },
              {"race in shared memory", line_of("its own block's"), line_of("the other's"), "block (0,0,0)",
               "block (1,0,0)", "No barrier of the cluster is between them"});
}

// Atomics do not race with each other, but with plain accesses.
template <bool kRight>
__global__ void counted(int* counter, int* out) {
  atomicAdd(counter, 1);  // counts
  if (kRight) __syncthreads();
  out[threadIdx.x] = *counter;  // looks
}

TEST(Race, PlainReadOfAnAtomic) {
  Memory<int> counter(1), out(64);
  counted<true><<<1, 64>>>(counter.get(), out.get());
  for (int value : out) EXPECT_EQ(value, 64);
  expect_race([&] { counted<false><<<1, 64>>>(counter.get(), out.get()); },
              {"atomically", line_of("counts"), line_of("looks")});
}

// Launches follow each other, and the host sees what they wrote.
__global__ void add_one(int* data) { data[threadIdx.x] += 1; }

TEST(Race, NoneBetweenLaunchesAndHost) {
  Memory<int> data(300);
  for (int round = 0; round < 10; ++round) {
    data[round] += 1;
    add_one<<<1, 300>>>(data.get());
    add_one<<<1, 100>>>(data.get() + 200);
  }
  EXPECT_EQ(data[0], 11);
  EXPECT_EQ(data[299], 20);
}

// More blocks than the detector has threads for: each is then several blocks' thread, and still nobody's memory.
__global__ void many_blocks(int* data) {
  __shared__ int tile[64];
  int local[3] = {1, 2, 3};
  tile[threadIdx.x] = local[threadIdx.x % 3];
  __syncthreads();
  data[blockIdx.x * blockDim.x + threadIdx.x] = tile[63 - threadIdx.x];
}

TEST(Race, NoneInManyBlocks) {
  Memory<int> data(300 * 64);
  many_blocks<<<300, 64>>>(data.get());
  EXPECT_EQ(data[0], 1);
}

// Blocks that wait for each other.
__device__ void wait_for_all(unsigned* arrived, unsigned goal) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(arrived, 1);
    while (atomicAdd(arrived, 0) < goal) {
    }
    __threadfence();
  }
  __syncthreads();
}
__global__ void exchange(int* a, int* b, unsigned* arrived) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
  a[i] = i;
  wait_for_all(arrived, gridDim.x);
  b[i] = a[n - 1 - i];  // another block's
}

TEST(Race, NoneWhereAGridWaits) {
  for (const dim3 shape : {dim3(4, 64), dim3(6, 1024), dim3(28, 256)}) {
    const unsigned threads = shape.x * shape.y;
    Memory<int> a(threads), b(threads);
    Memory<unsigned> arrived(1);
    exchange<<<shape.x, shape.y>>>(a.get(), b.get(), arrived.get());
    EXPECT_EQ(b[0], static_cast<int>(threads) - 1);
  }
}

// Volatile words with fences, each block for the one before.
__global__ void look_back(int* sums, volatile int* ready, volatile int* prefix) {
  __shared__ int before;
  if (threadIdx.x == 0) {
    before = 0;
    if (blockIdx.x > 0) {
      while (ready[blockIdx.x - 1] == 0) {
      }
      __threadfence();
      before = prefix[blockIdx.x - 1];
    }
    prefix[blockIdx.x] = before + 1;
    __threadfence();
    ready[blockIdx.x] = 1;
  }
  __syncthreads();
  if (threadIdx.x == 1) sums[blockIdx.x] = before;
}

TEST(Race, NoneWhereBlocksLookBack) {
  for (const dim3 shape : {dim3(40, 256), dim3(6, 1024)}) {
    Memory<int> sums(shape.x), ready(shape.x), prefix(shape.x);
    look_back<<<shape.x, shape.y>>>(sums.get(), ready.get(), prefix.get());
    EXPECT_EQ(sums[shape.x - 1], static_cast<int>(shape.x) - 1);
  }
}

__global__ void volatile_without_fences(int* data, volatile int* ready) {
  if (blockIdx.x == 0) {
    *data = 1;  // before the word
    *ready = 1;
  } else {
    while (*ready == 0) {
    }
    data[1] = *data;  // after the word
  }
}

TEST(Race, VolatileWordsOrderNothing) {
  Memory<int> data(2), ready(1);
  expect_race([&] { volatile_without_fences<<<2, 1>>>(data.get(), ready.get()); },
              {"race in global memory", line_of("before the word"), line_of("after the word")});
}

#ifdef KF_SIMT_TSAN
TEST(Race, SaysWhatItCannotFollow) {
  Memory<int> a(40 * 256), b(40 * 256);
  Memory<unsigned> arrived(1);
  test::expect_error([&] { exchange<<<40, 256>>>(a.get(), b.get(), arrived.get()); },
                     {"kernel exchange", "blocks have not", "can follow 7168 threads, and this grid has 10240"});
}

__global__ void nothing() {}

TEST(Race, RefusesMoreThreadsThanItCanFollow) {
  test::expect_error([] { cudaLaunchCooperativeKernel(nothing, 8, 1024, nullptr); },
                     {"8192 threads must be there at the same time", "7168"});
}
#endif

}  // namespace
