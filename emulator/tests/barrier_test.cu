// Barriers, and what goes wrong at them.
#include <cooperative_groups.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>

#include "errors.h"
#include "memory.h"

namespace {

using test::expect_parts;
using test::Memory;

// Such an error is found at once: no watchdog has to end the launch.
template <class Launch>
std::string error_of(Launch launch) {
  const auto begin = std::chrono::steady_clock::now();
  const std::string text = test::error_of(launch);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(1));
  return text;
}

__global__ void votes(int* out) {
  const int i = threadIdx.x;
  int ok = __syncthreads_count(i % 3 == 0) == 34;
  ok += __syncthreads_and(i < 100) == 1;
  ok += __syncthreads_and(i < 99) == 0;
  ok += __syncthreads_or(i == 57) == 1;
  ok += __syncthreads_or(i > 100) == 0;
  ok += __syncthreads_count(1) == 100;
  out[i] = ok;
}

TEST(Barrier, CountAndOr) {
  Memory<int> out(100);
  votes<<<1, 100>>>(out.get());
  for (int ok : out) ASSERT_EQ(ok, 6);
}

__global__ void some_exit() {
  if (threadIdx.x == 37 && blockIdx.y == 1) return;
  __syncthreads();
}

TEST(Barrier, ExitedThreadIsAnError) {
  const std::string text = error_of([] { some_exit<<<dim3(1, 2), 64>>>(); });
  expect_parts(
      text, {"kernel ", "some_exit", "block (0,1,0)", "thread (", "thread (37,0,0)", "has exited", "barrier_test.cu:"});
}

__global__ void exit_after_others_wait(int* out) {
  if (threadIdx.x == 0) return;
  out[blockIdx.x * blockDim.x + threadIdx.x] = __syncthreads_count(1);
}

TEST(Barrier, ExitedThreadIsAWarningWhenAskedFor) {
  Memory<int> out(80);
  kf::simt::set_exited_at_barrier(kf::simt::Exited::kWarn);
  testing::internal::CaptureStderr();
  exit_after_others_wait<<<2, 40>>>(out.get());
  const std::string text = testing::internal::GetCapturedStderr();
  kf::simt::set_exited_at_barrier(kf::simt::Exited::kDefault);
  for (int i = 0; i < 80; ++i) EXPECT_EQ(out[i], i % 40 == 0 ? 0 : 39);
  expect_parts(text, {"warning: ", "exit_after_others_wait", "thread (0,0,0)", "has exited"});
  EXPECT_EQ(text.find("warning", text.find("warning") + 1), std::string::npos) << "more than one warning";
}

__global__ void different_barriers() {
  if (threadIdx.x < 48) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

TEST(Barrier, DifferentBarriersAreAnError) {
  const std::string text = error_of([] { different_barriers<<<1, 64>>>(); });
  expect_parts(text, {"different_barriers", "block (0,0,0)", "thread (", "but thread (", "barrier_test.cu:"});
  EXPECT_NE(text.find("barrier_test.cu:"), text.rfind("barrier_test.cu:")) << "not both places in: " << text;
}

// clang-format off
__global__ void on_one_line() { if (threadIdx.x < 32) { __syncthreads(); } else { __syncthreads(); } }
#define MEET __syncthreads()
__global__ void of_a_macro() { if (threadIdx.x < 32) MEET; else MEET; }
#define MEET_IN_BRANCHES(condition) if (condition) { __syncthreads(); } else { __syncthreads(); }
__global__ void within_a_macro() { MEET_IN_BRANCHES(threadIdx.x < 32) }
#define COUNT_IN_BRANCHES(condition) (condition) ? __syncthreads_count(1) : __syncthreads_count(1)
__global__ void count_in_a_macro(int* out) { out[threadIdx.x] = COUNT_IN_BRANCHES(threadIdx.x < 32); }
namespace cg = cooperative_groups;
__global__ void of_a_group() { auto block = cg::this_thread_block(); if (threadIdx.x < 32) block.sync(); else block.sync(); }
template <class T>
__global__ void in_a_loop(T* out) { for (int i = 0; i < 4; ++i) { __syncthreads(); out[threadIdx.x] = i; __syncthreads(); } MEET; MEET; }
// clang-format on

TEST(Barrier, TwoOnOneLineAreTwo) {
  Memory<int> out(64);
  const std::initializer_list<std::string> parts = {"): is at __syncthreads (", "but thread (",
                                                    ") waits at __syncthreads (", ", another one on that line"};
  expect_parts(error_of([] { on_one_line<<<1, 64>>>(); }), parts);
  expect_parts(error_of([] { of_a_macro<<<1, 64>>>(); }), parts);
  expect_parts(error_of([] { within_a_macro<<<1, 64>>>(); }), parts);
  expect_parts(error_of([] { of_a_group<<<1, 64>>>(); }), parts);
  expect_parts(error_of([&] { count_in_a_macro<<<1, 64>>>(out.get()); }), parts);
  in_a_loop<<<1, 64>>>(out.get());
  EXPECT_EQ(out[63], 3);
}

__global__ void barrier_and_warp() {
  if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    __syncwarp();
  }
}

// As on a GPU, where they have one number.
TEST(Barrier, BranchesMeetWhenAskedFor) {
  setenv("KF_SIMT_BRANCHES", "warn", 1);
  Memory<int> out(64);
  testing::internal::CaptureStderr();
  different_barriers<<<3, 64>>>();
  count_in_a_macro<<<1, 64>>>(out.get());
  const std::string text = testing::internal::GetCapturedStderr();
  for (int count : out) EXPECT_EQ(count, 64);
  expect_parts(text, {"warning: kernel different_barriers", "kernel count_in_a_macro", "take them for one barrier"});
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2) << "more than a warning a launch: " << text;
  EXPECT_NE(error_of([] { barrier_and_warp<<<1, 32>>>(); }), "no error");
  unsetenv("KF_SIMT_BRANCHES");
}

TEST(Barrier, BarrierAndWarpOperationNeverMeet) {
  const std::string text = error_of([] { barrier_and_warp<<<1, 32>>>(); });
  expect_parts(
      text, {"barrier_and_warp", "block (0,0,0)", "thread (0,0,0)", "__syncthreads", "__syncwarp", "thread (16,0,0)"});
}

// A kernel that lacks a barrier is wrong under at least one schedule.
template <bool kBarrier>
__global__ void shift(const int* in, int* out) {
  __shared__ int buffer[256];
  buffer[threadIdx.x] = in[threadIdx.x];
  if (kBarrier) __syncthreads();
  out[threadIdx.x] = buffer[(threadIdx.x + 1) % 256] + buffer[(threadIdx.x + 255) % 256];
}

bool right_under(const char* schedule, bool barrier) {
  Memory<int> in(256), out(256);
  for (int i = 0; i < 256; ++i) in[i] = i;
  kf::simt::set_schedule(schedule);
  if (barrier) {
    shift<true><<<1, 256>>>(in.get(), out.get());
  } else {
    shift<false><<<1, 256>>>(in.get(), out.get());
  }
  kf::simt::set_schedule("");
  for (int i = 0; i < 256; ++i) {
    if (out[i] != (i + 1) % 256 + (i + 255) % 256) return false;
  }
  return true;
}

TEST(Schedule, FindsAMissingBarrier) {
  const char* const schedules[] = {"forward", "reverse", "random:1", "random:2"};
  int wrong = 0;
  for (const char* schedule : schedules) {
    EXPECT_TRUE(right_under(schedule, true)) << schedule;
#ifndef KF_SIMT_TSAN  // which would find the race at once
    wrong += !right_under(schedule, false);
#else
    ++wrong;
#endif
  }
  EXPECT_GE(wrong, 1);
}

__global__ void write_order(int* next, int* order) { order[threadIdx.x] = atomicAdd(next, 1); }

TEST(Schedule, RandomIsRepeatable) {
  const auto order_under = [](const char* schedule) {
    Memory<int> next(1), order(100);
    kf::simt::set_schedule(schedule);
    write_order<<<1, 100>>>(next.get(), order.get());
    kf::simt::set_schedule("");
    return std::vector<int>(order.begin(), order.end());
  };
  EXPECT_EQ(order_under("random:7"), order_under("random:7"));
  EXPECT_NE(order_under("random:7"), order_under("random:8"));
  EXPECT_NE(order_under("random:7"), order_under("forward"));
}

TEST(Schedule, RejectsWhatItDoesNotKnow) {
  EXPECT_THROW(kf::simt::set_schedule("backward"), std::invalid_argument);
  EXPECT_THROW(kf::simt::set_schedule("random:"), std::invalid_argument);
  EXPECT_THROW(kf::simt::set_schedule("random:x"), std::invalid_argument);
}

}  // namespace
