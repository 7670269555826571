// Atomics across blocks on several OS threads. programs/atomics.cu has all of them.
#include <gtest/gtest.h>
#include <kf_simt.h>

#include <algorithm>
#include <vector>

#include "memory.h"

namespace {

using test::Memory;

constexpr int kBlocks = 64, kThreads = 96, kAll = kBlocks * kThreads;

class Atomic : public testing::Test {
 protected:
  Atomic() { kf::simt::set_threads(4); }
  ~Atomic() override { kf::simt::set_threads(0); }
};

template <class T>
__global__ void add(T* sum, T* sub, T* order) {
  const T before = atomicAdd(sum, T(1));
  order[static_cast<int>(before)] += T(1);
  if constexpr (std::is_same_v<T, int> || std::is_same_v<T, unsigned>) atomicSub(sub, T(2));
}

template <class T>
void check_add() {
  Memory<T> sum(1), sub(1, T(2 * kAll)), order(kAll);
  add<<<kBlocks, kThreads>>>(sum.get(), sub.get(), order.get());
  EXPECT_EQ(sum[0], T(kAll));
  EXPECT_EQ(sub[0], T(std::is_same_v<T, int> || std::is_same_v<T, unsigned> ? 0 : 2 * kAll));
  // Every thread has seen a value that no other has seen.
  for (int i = 0; i < kAll; ++i) ASSERT_EQ(order[i], T(1));
}

TEST_F(Atomic, AddInt) { check_add<int>(); }
TEST_F(Atomic, AddUnsigned) { check_add<unsigned>(); }
TEST_F(Atomic, Add64) { check_add<unsigned long long>(); }
TEST_F(Atomic, AddFloat) { check_add<float>(); }
TEST_F(Atomic, AddDouble) { check_add<double>(); }

template <class T>
__global__ void add_by_cas(T* sum) {
  T seen = atomicCAS(sum, T(0), T(0)), expected;
  do {
    expected = seen;
    seen = atomicCAS(sum, expected, T(expected + 1));
  } while (seen != expected);
}

template <class T>
void check_cas() {
  Memory<T> sum(1);
  add_by_cas<<<kBlocks, kThreads>>>(sum.get());
  EXPECT_EQ(sum[0], T(kAll));
}

TEST_F(Atomic, CompareAndSwap) {
  check_cas<int>();
  check_cas<unsigned>();
  check_cas<unsigned long long>();
  check_cas<unsigned short>();
}

__global__ void exchange(int* slot, int* seen, float* float_slot) {
  const int mine = blockIdx.x * blockDim.x + threadIdx.x + 1;
  seen[atomicExch(slot, mine)] += 1;
  atomicExch(float_slot, 0.5f);
}

TEST_F(Atomic, Exchange) {
  Memory<int> slot(1), seen(kAll + 1);
  Memory<float> float_slot(1);
  exchange<<<kBlocks, kThreads>>>(slot.get(), seen.get(), float_slot.get());
  seen[slot[0]] += 1;
  for (int i = 0; i <= kAll; ++i) ASSERT_EQ(seen[i], 1);
  EXPECT_EQ(float_slot[0], 0.5f);
}

__global__ void histogram(const int* in, int* bins, int n) {
  __shared__ int local[16];
  if (threadIdx.x < 16) local[threadIdx.x] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&local[in[i]], 1);
  __syncthreads();
  if (threadIdx.x < 16) atomicAdd(&bins[threadIdx.x], local[threadIdx.x]);
}

TEST_F(Atomic, Histogram) {
  Memory<int> in(10000), bins(16);
  for (int i = 0; i < 10000; ++i) in[i] = i * i % 16;
  histogram<<<10, 64>>>(in.get(), bins.get(), 10000);
  std::vector<int> expected(16);
  for (int value : in) ++expected[value];
  EXPECT_TRUE(std::equal(bins.begin(), bins.end(), expected.begin()));
}

}  // namespace
