// Shuffles, votes, matches, reductions, __syncwarp.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <cmath>

#include "errors.h"
#include "memory.h"

namespace {

using test::expect_error;
using test::Memory;

constexpr unsigned kAll = 0xffffffffu;

// What the PTX manual says of shfl.sync: the lane that is read, or the own one if that is outside.
int source_lane(char mode, int lane, int b, int width) {
  const int first = lane & ~(width - 1), last = first + width - 1;
  int source = lane;
  if (mode == 'i') source = first | (b & (width - 1));
  if (mode == 'u') source = lane - b >= first ? lane - b : lane;
  if (mode == 'd') source = lane + b <= last ? lane + b : lane;
  if (mode == 'x') source = (lane ^ b) <= last ? lane ^ b : lane;
  return source;
}

template <class T>
__global__ void shuffle_all(T* out, int b, int width) {
  const T mine = T(threadIdx.x + 100);
  out[threadIdx.x] = __shfl_sync(kAll, mine, b, width);
  out[blockDim.x + threadIdx.x] = __shfl_up_sync(kAll, mine, b, width);
  out[2 * blockDim.x + threadIdx.x] = __shfl_down_sync(kAll, mine, b, width);
  out[3 * blockDim.x + threadIdx.x] = __shfl_xor_sync(kAll, mine, b, width);
}

template <class T>
void check_shuffles() {
  constexpr int kThreads = 64;
  Memory<T> out(4 * kThreads);
  for (const int width : {1, 2, 4, 8, 16, 32}) {
    for (int b = 0; b < 32; ++b) {
      shuffle_all<T><<<1, kThreads>>>(out.get(), b, width);
      int at = 0;
      for (const char mode : {'i', 'u', 'd', 'x'}) {
        for (int thread = 0; thread < kThreads; ++thread) {
          const int expected = thread / 32 * 32 + source_lane(mode, thread % 32, b, width) + 100;
          ASSERT_EQ(static_cast<float>(out[at++]), static_cast<float>(expected))
              << mode << " b " << b << " width " << width << " thread " << thread;
        }
      }
    }
  }
}

TEST(Shuffle, Int) { check_shuffles<int>(); }
TEST(Shuffle, Unsigned) { check_shuffles<unsigned>(); }
TEST(Shuffle, LongLong) { check_shuffles<long long>(); }
TEST(Shuffle, Float) { check_shuffles<float>(); }
TEST(Shuffle, Double) { check_shuffles<double>(); }
TEST(Shuffle, Half) { check_shuffles<__half>(); }
TEST(Shuffle, Bfloat16) { check_shuffles<__nv_bfloat16>(); }

__global__ void halves_of_a_warp(int* out) {
  const int lane = threadIdx.x;
  if (lane < 12) {
    out[lane] = __shfl_sync(0x00000fffu, lane * 10, (lane + 1) % 12);
  } else {
    int value = lane;
    for (int i = 0; i < 3; ++i) value = __shfl_xor_sync(0xfffff000u, value, 3);
    out[lane] = value;
  }
}

TEST(Shuffle, PartialMasksInDivergedBranches) {
  Memory<int> out(32);
  halves_of_a_warp<<<1, 32>>>(out.get());
  for (int lane = 0; lane < 32; ++lane) EXPECT_EQ(out[lane], lane < 12 ? (lane + 1) % 12 * 10 : lane ^ 3);
}

__global__ void partial_warp(float* out) { out[threadIdx.x] = __shfl_down_sync(kAll, float(threadIdx.x), 16); }

TEST(Shuffle, WhatIsReadFromAMissingLaneIsNan) {
  Memory<float> out(40);
  partial_warp<<<1, 40>>>(out.get());
  EXPECT_EQ(out[3], 19.0f);
  EXPECT_EQ(out[31], 31.0f);
  EXPECT_TRUE(std::isnan(out[32]));
}

__global__ void exited_lanes(int* out) {
  if (threadIdx.x % 2 == 1) return;
  out[threadIdx.x] = __shfl_xor_sync(kAll, int(threadIdx.x), 2);
}

TEST(Shuffle, ExitedLanesAreNotWaitedFor) {
  Memory<int> out(32);
  exited_lanes<<<1, 32>>>(out.get());
  for (int lane = 0; lane < 32; lane += 2) EXPECT_EQ(out[lane], lane ^ 2);
}

__global__ void bad_width(int* out) { *out = __shfl_sync(kAll, 1, 0, 3); }
__global__ void own_lane_missing(int* out) { *out = __shfl_sync(0xfu, 1, 0); }

TEST(Shuffle, Misuse) {
  Memory<int> out(1);
  expect_error([&] { bad_width<<<1, 32>>>(out.get()); }, {"width 3"});
  expect_error([&] { own_lane_missing<<<1, 32>>>(out.get()); }, {"0x0000000f", "warp_test.cu:"});
}

__global__ void lost_lane(int* out) {
  if (threadIdx.x == 3) {
    __syncwarp(0x8u);
    __syncthreads();
  } else {
    *out = __ballot_sync(kAll, 1);
  }
}

TEST(Vote, LaneThatDoesNotCome) {
  Memory<int> out(1);
  expect_error([&] { lost_lane<<<1, 32>>>(out.get()); },
               {"lost_lane", "__ballot_sync", "thread (3,0,0)", "__syncthreads"});
}

__global__ void votes(int* out) {
  const int lane = threadIdx.x % 32;
  int ok = __ballot_sync(kAll, lane % 2) == 0xaaaaaaaau;
  ok += __any_sync(kAll, lane == 9) == 1;
  ok += __any_sync(kAll, lane == 32) == 0;
  ok += __all_sync(kAll, lane < 32) == 1;
  ok += __all_sync(kAll, lane < 31) == 0;
  ok += __uni_sync(kAll, lane < 32) == 1;
  ok += __uni_sync(kAll, lane < 5) == 0;
  if (lane < 8) {
    ok += __ballot_sync(0xffu, lane > 3) == 0xf0u;
    ok += __all_sync(0xffu, lane < 8) == 1;
  } else {
    ok += __ballot_sync(0xffffff00u, lane < 10) == 0x300u;
    ok += __any_sync(0xffffff00u, lane < 8) == 0;
  }
  out[threadIdx.x] = ok;
}

TEST(Vote, BallotAnyAllUni) {
  Memory<int> out(96);
  votes<<<1, 96>>>(out.get());
  for (int ok : out) ASSERT_EQ(ok, 9);
}

__global__ void matches(unsigned* out, int* all) {
  const int lane = threadIdx.x;
  out[lane] = __match_any_sync(kAll, lane % 3);
  int same = -1;
  out[32 + lane] = __match_all_sync(kAll, 7.5f, &same);
  if (lane == 0) all[0] = same;
  out[64 + lane] = __match_all_sync(kAll, lane / 31, &same);
  if (lane == 0) all[1] = same;
  if (lane >= 16) out[lane] = __match_any_sync(0xffff0000u, static_cast<unsigned long long>(lane % 2) << 40);
}

TEST(Match, AnyAndAll) {
  Memory<unsigned> out(96);
  Memory<int> all(2);
  matches<<<1, 32>>>(out.get(), all.get());
  for (int lane = 0; lane < 32; ++lane) {
    unsigned expected = 0;
    for (int other = 0; other < 32; ++other) {
      if (lane < 16 && other % 3 == lane % 3) expected |= 1u << other;
      if (lane >= 16 && other >= 16 && other % 2 == lane % 2) expected |= 1u << other;
    }
    EXPECT_EQ(out[lane], expected);
    EXPECT_EQ(out[32 + lane], kAll);
    EXPECT_EQ(out[64 + lane], 0u);
  }
  EXPECT_EQ(all[0], 1);
  EXPECT_EQ(all[1], 0);
}

__global__ void reductions(int* out) {
  const int lane = threadIdx.x;
  int ok = __reduce_add_sync(kAll, lane) == 496;
  ok += __reduce_min_sync(kAll, lane - 5) == -5;
  ok += __reduce_max_sync(kAll, unsigned(lane)) == 31u;
  ok += __reduce_and_sync(kAll, 0xf0u | lane) == 0xf0u;
  ok += __reduce_or_sync(kAll, 1u << lane) == kAll;
  ok += __reduce_xor_sync(kAll, 1u << (lane / 2)) == 0u;
  if (lane < 4) ok += __reduce_add_sync(0xfu, 1u) == 4u;
  out[lane] = ok;
}

TEST(Reduce, AllOfThem) {
  Memory<int> out(32);
  reductions<<<1, 32>>>(out.get());
  for (int lane = 0; lane < 32; ++lane) EXPECT_EQ(out[lane], lane < 4 ? 7 : 6);
}

// Lanes exchange through shared memory; __syncwarp is all that orders them.
template <bool kSync>
__global__ void neighbours(int* out) {
  __shared__ int buffer[32];
  buffer[threadIdx.x] = threadIdx.x;
  if (kSync) __syncwarp();
  const int got = buffer[(threadIdx.x + 1) % 32] + buffer[(threadIdx.x + 31) % 32];
  if (kSync) __syncwarp();
  out[threadIdx.x] = got;
}

TEST(Syncwarp, Orders) {
  int wrong_without = 0;
  for (const char* schedule : {"forward", "reverse", "random:3", "random:4"}) {
    kf::simt::set_schedule(schedule);
    Memory<int> out(32);
    neighbours<true><<<1, 32>>>(out.get());
    for (int i = 0; i < 32; ++i) ASSERT_EQ(out[i], (i + 1) % 32 + (i + 31) % 32);
#ifdef KF_SIMT_TSAN
    EXPECT_THROW(neighbours<false><<<1, 32>>>(out.get()), kf::simt::Error);
    wrong_without += 1;
    kf::simt::set_schedule("");
    break;  // the race of two lines is reported once
#endif
    neighbours<false><<<1, 32>>>(out.get());
    for (int i = 0; i < 32; ++i) wrong_without += out[i] != (i + 1) % 32 + (i + 31) % 32;
    kf::simt::set_schedule("");
  }
  EXPECT_GT(wrong_without, 0);
}

__global__ void partial_syncwarp(int* out) {
  __shared__ int buffer[32];
  const int lane = threadIdx.x;
  buffer[lane] = -1;
  __syncwarp();
  if (lane < 8) {
    buffer[lane] = lane;
    __syncwarp(0xffu);
    out[lane] = buffer[7 - lane];
  } else {
    out[lane] = lane;
  }
}

TEST(Syncwarp, PartialMask) {
  Memory<int> out(32);
  partial_syncwarp<<<1, 32>>>(out.get());
  for (int lane = 0; lane < 32; ++lane) EXPECT_EQ(out[lane], lane < 8 ? 7 - lane : lane);
}

__global__ void active(unsigned* out) {
  if (threadIdx.x % 4 == 0) {
    out[threadIdx.x] = __activemask();
  } else {
    out[threadIdx.x] = __activemask();
  }
}

TEST(Activemask, LanesThatAreHereTogether) {
  Memory<unsigned> out(40);
  active<<<1, 40>>>(out.get());
  for (int i = 0; i < 32; ++i) EXPECT_EQ(out[i], i % 4 == 0 ? 0x11111111u : 0xeeeeeeeeu);
  for (int i = 32; i < 40; ++i) EXPECT_EQ(out[i], i % 4 == 0 ? 0x11u : 0xeeu);
}

// An operation that a wrapper of a warp-wide instruction would define.
struct Row {
  float in;
  float sum;
};
struct SumRows {
  void operator()(Row* const* lanes, unsigned present) const {
    float sum = 0;
    for (int i = 0; i < 32; ++i) sum += present >> i & 1 ? lanes[i]->in : 0.0f;
    for (int i = 0; i < 32; ++i) {
      if (lanes[i] != nullptr) lanes[i]->sum = sum * (i + 1);
    }
  }
};

__global__ void collective(float* out) {
  Row row{float(threadIdx.x % warpSize), 0};
  kf::simt::warp_collective<SumRows>("sum_rows", row);
  out[threadIdx.x] = row.sum;
}

TEST(Collective, OfAWrapper) {
  Memory<float> out(64);
  collective<<<1, 64>>>(out.get());
  for (int i = 0; i < 64; ++i) EXPECT_EQ(out[i], 496.0f * (i % 32 + 1));
}

}  // namespace
