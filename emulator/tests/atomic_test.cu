// Atomics across blocks on several OS threads.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
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
  if (order != nullptr) order[static_cast<int>(before)] += T(1);
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
__global__ void extremes(T* low, T* high) {
  const T mine = T(blockIdx.x * blockDim.x + threadIdx.x) - T(std::is_signed_v<T> ? 1000 : 0);
  atomicMin(low, mine);
  atomicMax(high, mine);
}

template <class T>
void check_extremes() {
  Memory<T> low(1, T(100)), high(1, T(5));
  extremes<<<kBlocks, kThreads>>>(low.get(), high.get());
  const T shift = T(std::is_signed_v<T> ? 1000 : 0);
  EXPECT_EQ(low[0], T(0) - shift);
  EXPECT_EQ(high[0], T(kAll - 1) - shift);
}

TEST_F(Atomic, MinMaxInt) { check_extremes<int>(); }
TEST_F(Atomic, MinMaxUnsigned) { check_extremes<unsigned>(); }
TEST_F(Atomic, MinMax64) { check_extremes<unsigned long long>(); }
TEST_F(Atomic, MinMaxSigned64) { check_extremes<long long>(); }

template <class T>
__global__ void bits(T* all) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  atomicOr(&all[0], T(1) << (i % 32));
  atomicAnd(&all[1], ~(T(1) << (i % 16)));
  atomicXor(&all[2], T(1) << (i % 8));
}

template <class T>
void check_bits() {
  Memory<T> all(3);
  all[1] = ~T(0);
  bits<<<kBlocks, kThreads>>>(all.get());
  EXPECT_EQ(all[0], T(0xffffffffu));
  EXPECT_EQ(all[1], T(~T(0xffff)));
  EXPECT_EQ(all[2], T(0));  // each bit an even number of times
}

TEST_F(Atomic, AndOrXor) {
  check_bits<int>();
  check_bits<unsigned>();
  check_bits<unsigned long long>();
}

template <class T>
__global__ void add_by_cas(T* sum) {
  T seen = atomicCAS(sum, T(0), T(0)), expected;
  do {
    expected = seen;
    seen = atomicCAS(sum, expected, T(expected + 1));
  } while (seen != expected);
}

TEST_F(Atomic, CompareAndSwap) {
  Memory<int> a(1);
  Memory<unsigned> b(1);
  Memory<unsigned long long> c(1);
  Memory<unsigned short> d(1);
  add_by_cas<<<kBlocks, kThreads>>>(a.get());
  add_by_cas<<<kBlocks, kThreads>>>(b.get());
  add_by_cas<<<kBlocks, kThreads>>>(c.get());
  add_by_cas<<<kBlocks, kThreads>>>(d.get());
  EXPECT_EQ(a[0], kAll);
  EXPECT_EQ(b[0], unsigned(kAll));
  EXPECT_EQ(c[0], static_cast<unsigned long long>(kAll));
  EXPECT_EQ(d[0], kAll);
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

__global__ void wrap(unsigned* up, unsigned* down) {
  atomicInc(up, 9);    // 0 … 9, 0 …
  atomicDec(down, 9);  // 9 … 0, 9 …
}

TEST_F(Atomic, IncDec) {
  Memory<unsigned> up(1), down(1);
  wrap<<<7, 3>>>(up.get(), down.get());
  EXPECT_EQ(up[0], 1u);
  EXPECT_EQ(down[0], 9u);
}

__global__ void halves(__half* h, __half2* h2, __nv_bfloat16* b, __nv_bfloat162* b2) {
  atomicAdd(h, __float2half(1.0f));
  atomicAdd(h2, __floats2half2_rn(1.0f, 2.0f));
  atomicAdd(b, __float2bfloat16(1.0f));
  atomicAdd(b2, __floats2bfloat162_rn(1.0f, 2.0f));
}

TEST_F(Atomic, HalfTypes) {
  Memory<__half> h(1);
  Memory<__half2> h2(1);
  Memory<__nv_bfloat16> b(1);
  Memory<__nv_bfloat162> b2(1);
  halves<<<8, 16>>>(h.get(), h2.get(), b.get(), b2.get());
  EXPECT_EQ(__half2float(h[0]), 128.0f);
  EXPECT_EQ(__low2float(h2[0]), 128.0f);
  EXPECT_EQ(__high2float(h2[0]), 256.0f);
  EXPECT_EQ(__bfloat162float(b[0]), 128.0f);
  EXPECT_EQ(__high2float(b2[0]), 256.0f);
}

__global__ void scopes(int* all, float4* vector) {
  atomicAdd_block(&all[0], 1);
  atomicAdd_system(&all[1], 1);
  atomicAdd(vector, make_float4(1, 2, 3, 4));
}

TEST_F(Atomic, Scopes) {
  Memory<int> all(2);
  Memory<float4> vector(1);
  scopes<<<4, 8>>>(all.get(), vector.get());
  EXPECT_EQ(all[0], 32);
  EXPECT_EQ(all[1], 32);
  EXPECT_EQ(vector[0].w, 128.0f);
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
