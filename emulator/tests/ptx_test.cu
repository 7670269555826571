// Inline PTX as programs write it: what has no wrapper in the steps. Those that have are tested there, on GPUs too.
#include <cooperative_groups.h>
#include <cuda.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "errors.h"
#include "memory.h"

namespace {

using test::expect_error;
using test::Memory;

// One thread that computes numbers, some of them in the lower half of a word.
void expect_results(void (*kernel)(std::uint64_t*), const std::vector<std::uint64_t>& expected) {
  Memory<std::uint64_t> got(expected.size(), 0xbad0bad0u);
  kernel<<<1, 1>>>(got.get());
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(got[i], expected[i]) << "result " << i;
}

__device__ std::uint32_t& word(std::uint64_t& x) { return reinterpret_cast<std::uint32_t&>(x); }
__device__ float& real(std::uint64_t& x) { return reinterpret_cast<float&>(x); }

__global__ void integers(std::uint64_t* out) {
  asm("add.u32 %0, %1, %2;" : "=r"(word(out[0])) : "r"(0xffffffffu), "r"(3));
  asm("mul.hi.u32 %0, %1, %2;" : "=r"(word(out[1])) : "r"(0x80000000u), "r"(6));
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(out[2]) : "r"(0xffffffffu), "r"(0xffffffffu), "l"(5ull));
  asm("mul.wide.s32 %0, %1, %2;" : "=l"(out[3]) : "r"(-3), "r"(5));
  asm("shr.s32 %0, %1, 40;" : "=r"(word(out[4])) : "r"(-8));
  asm("bfe.u32 %0, %1, 8, 12;" : "=r"(word(out[5])) : "r"(0x12345678));
  asm("bfe.s32 %0, %1, %2, %3;" : "=r"(word(out[6])) : "r"(0x00000f00), "r"(8), "r"(4));
  asm("bfi.b32 %0, %1, %2, 4, 8;" : "=r"(word(out[7])) : "r"(0xab), "r"(0xffffffffu));
  asm("prmt.b32 %0, %1, %2, 0x7531;" : "=r"(word(out[8])) : "r"(0x33221100), "r"(0x77665544));
  asm("lop3.b32 %0, %1, %2, %3, 0x96;" : "=r"(word(out[9])) : "r"(0xf0f0), "r"(0xff00), "r"(0x3333));
  asm("shf.l.wrap.b32 %0, %1, %2, %3;" : "=r"(word(out[10])) : "r"(0x80000001u), "r"(0x12345678), "r"(36));
  asm("popc.b64 %0, %1;" : "=r"(word(out[11])) : "l"(0xff00000000000001ull));
  asm("clz.b32 %0, %1;" : "=r"(word(out[12])) : "r"(0x00010000));
  asm("bfind.u32 %0, %1;" : "=r"(word(out[13])) : "r"(0x00010000));
  asm("brev.b32 %0, %1;" : "=r"(word(out[14])) : "r"(1));
  asm("min.s32 %0, %1, %2;" : "=r"(word(out[15])) : "r"(-4), "r"(3));
  asm("{.reg .b32 lo, hi; mov.b64 {lo, hi}, %1; mov.b64 %0, {hi, lo};}" : "=l"(out[16]) : "l"(0x1122334455667788ull));
  asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(word(out[17])) : "r"(0xff020304), "r"(0x01010101), "r"(10));
  std::uint16_t h;
  asm("add.u16 %0, %1, %2;" : "=h"(h) : "h"(std::uint16_t{0xffff}), "h"(std::uint16_t{2}));
  out[18] = h;
  asm("rem.s32 %0, %1, %2;" : "=r"(word(out[19])) : "r"(-7), "r"(3));
}

TEST(Ptx, Integers) {
  expect_results(
      integers,
      {2,          3,          0xfffffffe00000006,       0xfffffffffffffff1, 0xffffffff, 0x456,     0xffffffff,
       0xfffffabf, 0x77553311, 0xf0f0 ^ 0xff00 ^ 0x3333, 0x23456788,         9,          15,        16,
       0x80000000, 0xfffffffc, 0x5566778811223344,       10 + 4 + 3 + 2 - 1, 1,          0xffffffff});
}

__global__ void floats(std::uint64_t* out) {
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(real(out[0])) : "f"(1.5f), "f"(2.0f), "f"(0.25f));
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(real(out[1])) : "f"(-3.0f));
  asm("lg2.approx.f32 %0, %1;" : "=f"(real(out[2])) : "f"(32.0f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(real(out[3])) : "f"(4.0f));
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(real(out[4])) : "f"(16.0f));
  asm("add.ftz.f32 %0, %1, %2;" : "=f"(real(out[5])) : "f"(1e-40f), "f"(0.0f));
  asm("max.f32 %0, %1, %2;" : "=f"(real(out[6])) : "f"(-1.0f), "f"(NAN));
  asm("add.sat.f32 %0, %1, 0f3F800000;" : "=f"(real(out[7])) : "f"(0.5f));
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word(out[8])) : "f"(2.0f), "f"(1.0f));
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word(out[9])) : "f"(2.0f), "f"(1.0f));
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(word(out[10])) : "r"(0x40003f80), "r"(0x40404040), "r"(0x3f803f80));
  asm("add.f16x2 %0, %1, %2;" : "=r"(word(out[11])) : "r"(0x40003c00), "r"(0x3c003c00));
  asm("cvt.rzi.s32.f32 %0, %1;" : "=r"(word(out[12])) : "f"(-2.7f));
  asm("cvt.rni.f32.f32 %0, %1;" : "=f"(real(out[13])) : "f"(2.5f));
  asm("cvt.rzi.u32.f32 %0, %1;" : "=r"(word(out[14])) : "f"(-5.0f));
  asm("cvt.rn.f32.s32 %0, %1;" : "=f"(real(out[15])) : "r"(-7));
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(word(out[16])) : "f"(__uint_as_float(0x3f801000)));
  std::uint16_t h;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(h) : "f"(1000.0f), "f"(-1.5f));
  out[17] = h;
  asm("{.reg .pred p; setp.gt.f32 p, %1, %2; selp.f32 %0, %1, %2, p;}" : "=f"(real(out[18])) : "f"(3.0f), "f"(4.0f));
  asm("{.reg .pred p, q; setp.lt.and.s32 p|q, %1, 5, 1; selp.u32 %0, 1, 2, q;}" : "=r"(word(out[19])) : "r"(7));
  double d;
  asm("fma.rn.f64 %0, %1, %1, 0d3FF0000000000000;" : "=d"(d) : "d"(3.0));
  out[20] = static_cast<std::uint64_t>(d);
}

TEST(Ptx, FloatingPoint) {
  const auto f = [](float x) {
    std::uint32_t word;
    std::memcpy(&word, &x, 4);
    return std::uint64_t{word};
  };
  // In the line with two predicates the second operand of `and` is the constant 1.
  expect_results(floats, {f(3.25f), f(0.125f),  f(5),       f(0.25f),   f(0.25f),   f(0),       f(-1),
                          f(1),     0x40003f80, 0x40003c00, 0x40e04080, 0x42004000, 0xfffffffe, f(2),
                          0,        f(-7),      0x3f802000, 0x7ebc,     f(4),       1,          10});
}

// A loop, a jump forward, and a label that every copy of the statement has for itself.
#define COUNT_TO(n, limit)         \
  asm volatile(                    \
      "{\n"                        \
      ".reg .pred p;\n"            \
      "AGAIN_%=:\n"                \
      "  setp.ge.s32 p, %0, %1;\n" \
      "  @p bra DONE_%=;\n"        \
      "  add.s32 %0, %0, 1;\n"     \
      "  bra AGAIN_%=;\n"          \
      "DONE_%=:\n"                 \
      "}"                          \
      : "+r"(n)                    \
      : "r"(limit))

__global__ void jumps(std::uint64_t* out) {
  int a = 0, b = 10;
  COUNT_TO(a, 7);
  COUNT_TO(b, 7);
  out[0] = a;
  out[1] = b;
  int c = 5;
  if (a == 7)
    asm volatile("{ .reg .pred p; setp.eq.s32 p, %0, 5; @!p add.s32 %0, %0, 100; @p sub.s32 %0, %0, 1; }" : "+r"(c));
  else
    c = -1;
  out[2] = c;
  int d = 1;
  asm volatile(
      "{ .reg .b32 x<3>; mov.b32 x0, 4; mov.b32 x1, x0; { .reg .b32 x1; mov.b32 x1, 9; add.s32 %0, %0, x1; } "
      "add.s32 %0, %0, x1; }"
      : "+r"(d));
  out[3] = d;
}

TEST(Ptx, PredicatesLabelsAndScopes) { expect_results(jumps, {7, 10, 4, 1 + 9 + 4}); }

__global__ void memory(std::uint32_t* words, std::uint64_t* out) {
  __shared__ __align__(16) std::uint32_t tile[8];
  std::uint32_t a, b, c, d;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "l"(words));
  out[0] = a + 10 * b + 100 * c + 1000 * d;
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  asm volatile("st.shared.v2.b32 [%0 + 8], {%1, %2};" ::"r"(address), "r"(a), "r"(d));
  asm volatile("ld.shared.u8 %0, [%1+8];" : "=r"(b) : "r"(address));
  out[1] = b;
  out[2] = tile[2] + 10 * tile[3];
  asm volatile("{ .reg .u64 s; .reg .u32 t; cvta.to.shared.u64 s, %1; cvt.u32.u64 t, s; ld.shared.u32 %0, [t]; }"
               : "=r"(c)
               : "l"(&tile[3]));
  out[3] = c;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(c) : "l"(words + 1), "r"(5));
  asm volatile("red.global.max.u32 [%0], %1;" ::"l"(words + 1), "r"(6) : "memory");
  asm volatile("atom.global.cas.b32 %0, [%1], 7, 8;" : "=r"(d) : "l"(words + 1));
  out[4] = c + 10 * d + 100 * words[1];
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(words), "r"(77) : "memory");
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(a) : "l"(words) : "memory");
  out[5] = a;
  float f;
  asm volatile(
      "{ .reg .b64 p; createpolicy.fractional.L2::evict_first.b64 p, 1.0; "
      "ld.global.L2::cache_hint.f32 %0, [%1], p; }"
      : "=f"(f)
      : "l"(words + 4));
  out[6] = static_cast<std::uint64_t>(f);
}

TEST(Ptx, LoadsStoresAndAtomics) {
  Memory<std::uint32_t> words(5);
  Memory<std::uint64_t> out(7);
  for (int i = 0; i < 4; ++i) words[i] = i + 1;
  const float six = 6;
  std::memcpy(&words[4], &six, 4);
  memory<<<1, 1>>>(words.get(), out.get());
  const std::uint64_t expected[] = {4321, 1, 41, 4, 2 + 70 + 800, 77, 6};
  for (int i = 0; i < 7; ++i) EXPECT_EQ(out[i], expected[i]) << "result " << i;
}

// One block writes messages whose halves agree, the other reads until the last is there. A torn one would differ.
__global__ void wide(unsigned long long* message, unsigned* torn) {
  unsigned long long low = 0, high = 0;
  for (unsigned long long i = 1; i <= 2000 && high < 2000; ++i) {
    if (blockIdx.x == 0) {
      asm volatile("{ .reg .b128 m; mov.b128 m, {%1, %1}; st.relaxed.gpu.global.b128 [%0], m; }" ::"l"(message), "l"(i)
                   : "memory");
      continue;
    }
    i = 1;
    asm volatile("{ .reg .b128 m; ld.relaxed.gpu.global.b128 m, [%2]; mov.b128 {%0, %1}, m; }"
                 : "=l"(low), "=l"(high)
                 : "l"(message)
                 : "memory");
    *torn += low != high;
  }
}

TEST(Ptx, LoadsAndStoresOf128BitsAreNotTorn) {
  Memory<unsigned long long> message(2);
  Memory<unsigned> torn(1);
  message[0] = message[1] = 0;
  torn[0] = 0;
  wide<<<2, 1>>>(message.get(), torn.get());
  EXPECT_EQ(torn[0], 0u);
  EXPECT_EQ(message[1], 2000u);
}

__global__ void warps(std::uint32_t* out) {
  std::uint32_t lane, below, sum, from, elected, ballot, inside;
  asm("mov.u32 %0, %laneid;" : "=r"(lane));
  asm("mov.u32 %0, %%lanemask_lt;" : "=r"(below));
  asm volatile("redux.sync.add.u32 %0, %1, 0xffffffff;" : "=r"(sum) : "r"(lane));
  asm volatile("{ .reg .pred p; shfl.sync.up.b32 %0|p, %2, 3, 0x0, 0xffffffff; selp.u32 %1, 1, 0, p; }"
               : "=r"(from), "=r"(inside)
               : "r"(lane + 100));
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
  asm volatile("{ .reg .pred p; setp.lt.u32 p, %1, 5; vote.sync.ballot.b32 %0, p, 0xffffffff; }"
               : "=r"(ballot)
               : "r"(lane));
  std::uint32_t* const mine = out + 8 * lane;
  mine[0] = lane;
  mine[1] = below;
  mine[2] = sum;
  mine[3] = from;
  mine[4] = inside;
  mine[5] = elected;
  mine[6] = ballot;
  std::uint32_t moved;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"
               : "=r"(moved)
               : "r"((lane / 4 * 8 + lane % 4 * 2) | (lane / 4 * 8 + lane % 4 * 2 + 1) << 16));
  mine[7] = moved;
}

TEST(Ptx, WarpOperations) {
  Memory<std::uint32_t> out(32 * 8);
  warps<<<1, 32>>>(out.get());
  for (std::uint32_t lane = 0; lane < 32; ++lane) {
    const std::uint32_t g = lane / 4, t = lane % 4;
    const std::uint32_t expected[] = {lane,      (1u << lane) - 1, 496, lane >= 3 ? lane + 97 : lane + 100,
                                      lane >= 3, lane == 0,        31,  (2 * t * 8 + g) | ((2 * t + 1) * 8 + g) << 16};
    for (int i = 0; i < 8; ++i) EXPECT_EQ(out[8 * lane + i], expected[i]) << "lane " << lane << ", result " << i;
  }
}

// Two halves of a block meet at barriers of their own; a third barrier hands over from one to the other.
__global__ void named_barriers(int* out) {
  __shared__ int first[32], second[32];
  const int i = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    first[i] = i;
    asm volatile("bar.sync 1, 32;" ::: "memory");
    second[i] = first[31 - i];
    asm volatile("bar.arrive %0, %1;" ::"r"(2), "n"(64) : "memory");
  } else {
    asm volatile("barrier.sync 2, 64;" ::: "memory");
    out[i] = second[i];
  }
}

TEST(Ptx, NamedBarriers) {
  Memory<int> out(32);
  named_barriers<<<1, 64>>>(out.get());
  for (int i = 0; i < 32; ++i) EXPECT_EQ(out[i], 31 - i);
}

template <class T>
__device__ std::uint32_t quad(T a, T b, T c, T d) {
  return static_cast<std::uint8_t>(a) | static_cast<std::uint8_t>(b) << 8 | static_cast<std::uint8_t>(c) << 16 |
         static_cast<std::uint32_t>(static_cast<std::uint8_t>(d)) << 24;
}

// c = a · b for 16 × 32 and 32 × 8 bytes, for 8-bit floats that are 1 or 0, and for doubles.
__global__ void other_products(std::int32_t* integers, float* bytes, double* doubles, std::uint32_t* halves) {
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  std::uint32_t a[4], b[2];
  for (int r = 0; r < 4; ++r) {
    const int row = g + 8 * (r % 2), k = r / 2 * 16 + t * 4;
    a[r] = quad(row - k, row - k - 1, row - k - 2, row - k - 3);
  }
  for (int r = 0; r < 2; ++r) {
    const int k = r * 16 + t * 4;
    b[r] = quad(k * g % 7, (k + 1) * g % 7, (k + 2) * g % 7, (k + 3) * g % 7);
  }
  std::int32_t sum[4];
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=r"(sum[0]), "=r"(sum[1]), "=r"(sum[2]), "=r"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(1000));
  for (int i = 0; i < 4; ++i) integers[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = sum[i];

  // 0x38 is 1 in e4m3, 0x3c is 1 in e5m2.
  for (int r = 0; r < 4; ++r) a[r] = g + 8 * (r % 2) == 3 ? 0x38383838 : 0;
  for (int r = 0; r < 2; ++r) b[r] = 0x3c3c3c3c;
  float product[4] = {};
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(product[0]), "+f"(product[1]), "+f"(product[2]), "+f"(product[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  for (int i = 0; i < 4; ++i) bytes[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = product[i];

  double x = 0.5, y = 0.25;
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
               : "+d"(x), "+d"(y)
               : "d"(g + 0.125 * t), "d"(t + 10.0 * g));
  doubles[g * 8 + 2 * t] = x;
  doubles[g * 8 + 2 * t + 1] = y;

  // float16 in, float16 out: rows of ones by columns of ones, sixteen times 1, plus 1.
  for (std::uint32_t& r : a) r = 0x3c003c00;
  for (std::uint32_t& r : b) r = 0x3c003c00;
  std::uint32_t d[2];
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%8,%8};"
               : "=r"(d[0]), "=r"(d[1])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(0x3c003c00));
  halves[2 * lane] = d[0];
  halves[2 * lane + 1] = d[1];
}

TEST(Ptx, ProductsOfOtherTypes) {
  Memory<std::int32_t> integers(128);
  Memory<float> bytes(128);
  Memory<double> doubles(64);
  Memory<std::uint32_t> halves(64);
  other_products<<<1, 32>>>(integers.get(), bytes.get(), doubles.get(), halves.get());
  for (int row = 0; row < 16; ++row) {
    for (int col = 0; col < 8; ++col) {
      int sum = 1000;
      for (int k = 0; k < 32; ++k) sum += (row - k) * (k * col % 7);
      EXPECT_EQ(integers[row * 8 + col], sum) << row << ", " << col;
      EXPECT_EQ(bytes[row * 8 + col], row == 3 ? 32 : 0) << row << ", " << col;
      if (row >= 8) continue;
      double product = col % 2 == 0 ? 0.5 : 0.25;
      for (int k = 0; k < 4; ++k) product += (row + 0.125 * k) * (k + 10.0 * col);
      EXPECT_EQ(doubles[row * 8 + col], product) << row << ", " << col;
    }
  }
  for (int i = 0; i < 64; ++i) EXPECT_EQ(halves[i], 0x4c404c40u) << i;  // 17
}

// A wait that is missing: what was not waited for is not there.
__global__ void no_wait(const float* in, float* out) {
  __shared__ __align__(16) float tile[4];
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(in));
  asm volatile("cp.async.commit_group;");
  out[0] = tile[0];
  asm volatile("cp.async.wait_group 0;");
  out[1] = tile[0];
}

TEST(Ptx, ACopyIsNotThereBeforeItsWait) {
  kf::simt::set_schedule("forward");
  Memory<float> in(4, 3.0f), out(2);
  no_wait<<<1, 1>>>(in.get(), out.get());
  EXPECT_TRUE(std::isnan(out[0]));
  EXPECT_EQ(out[1], 3.0f);
  kf::simt::set_schedule("");
}

__global__ void misaligned(const float* in, float* out) {
  asm volatile("{ .reg .f32 y; ld.global.v2.f32 {%0, y}, [%1]; }" : "=f"(*out) : "l"(in + 1));
}
__global__ void no_barrier() {
  __shared__ std::uint64_t barrier;
  asm volatile(
      "mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(&barrier))));
}
__global__ void too_many_arrive() {
  __shared__ std::uint64_t barrier;
  const auto at = static_cast<unsigned>(__cvta_generic_to_shared(&barrier));
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 2;" ::"r"(at));
  __syncthreads();
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], 3;" ::"r"(at));
}
__global__ void never_complete() {
  __shared__ std::uint64_t barrier;
  const auto at = static_cast<unsigned>(__cvta_generic_to_shared(&barrier));
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 2;" ::"r"(at));
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at));
  asm volatile(
      "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @p bra DONE; bra WAIT; DONE: }" ::"r"(
          at));
}
__global__ void half_a_warp() {
  float d[4] = {};
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%4}, {%4}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(0));
}
__global__ void not_a_map(const void* map) {
  __shared__ __align__(128) float tile[32];
  __shared__ std::uint64_t barrier;
  asm volatile(
      "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {0}], [%2];" ::"r"(
          static_cast<unsigned>(__cvta_generic_to_shared(tile))),
      "l"(map), "r"(static_cast<unsigned>(__cvta_generic_to_shared(&barrier))));
}

// An H200 stops at both with "an illegal instruction was encountered".
__global__ void load_at(const __grid_constant__ CUtensorMap map, int x) {
  __shared__ __align__(128) float tile[32];
  __shared__ std::uint64_t barrier;
  asm volatile(
      "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3}], [%2];" ::"r"(
          static_cast<unsigned>(__cvta_generic_to_shared(tile))),
      "l"(&map), "r"(static_cast<unsigned>(__cvta_generic_to_shared(&barrier))), "r"(x));
}
__global__ void store_at(const __grid_constant__ CUtensorMap map, int x) {
  __shared__ __align__(128) float tile[32];
  asm volatile("cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%0, {%2}], [%1];" ::"l"(&map),
               "r"(static_cast<unsigned>(__cvta_generic_to_shared(tile))), "r"(x));
}

TEST(Ptx, NamesCoordinatesThatTmaCannotTake) {
  Memory<float> tensor(64);
  const cuuint64_t size = 64;
  const cuuint32_t box = 32, step = 1;
  CUtensorMap map;
  ASSERT_EQ(cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 1, tensor.get(), &size, &size, &box, &step,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                   CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
            CUDA_SUCCESS);
  expect_error([&] { load_at<<<1, 1>>>(map, 2); }, {"at element 2 of the innermost dimension"});
  expect_error([&] { store_at<<<1, 1>>>(map, -4); }, {"coordinate below 0"});
}

TEST(Ptx, NamesFaults) {
  Memory<float> in(64), out(1);
  expect_error([&] { misaligned<<<1, 1>>>(in.get(), out.get()); }, {"is not a multiple of 8"});
  expect_error([&] { no_barrier<<<1, 1>>>(); }, {"mbarrier that is not initialised"});
  expect_error([&] { too_many_arrive<<<1, 1>>>(); }, {"expects 2 more in this phase"});
  expect_error([&] { half_a_warp<<<1, 16>>>(); }, {"mma.sync needs all 32 lanes"});
  expect_error([&] { not_a_map<<<1, 1>>>(in.get()); }, {"cuTensorMapEncodeTiled did not make"});
  kf::simt::set_watchdog(0.1, 10);
  expect_error([&] { never_complete<<<1, 1>>>(); }, {"never_complete"});
  kf::simt::set_watchdog(-1, -1);
}

// The class of cooperative groups.
__global__ void __cluster_dims__(2, 1, 1) group(int* out) {
  namespace cg = cooperative_groups;
  __shared__ int value;
  const cg::cluster_group cluster = cg::this_cluster();
  if (threadIdx.x == 0) value = 10 * static_cast<int>(cluster.block_rank());
  cluster.sync();
  const int* const other = cluster.map_shared_rank(&value, 1 - static_cast<int>(cluster.block_rank()));
  if (threadIdx.x == 0) {
    int* const mine = out + 4 * blockIdx.x;
    mine[0] = *other;
    mine[1] = static_cast<int>(cluster.num_blocks());
    mine[2] = static_cast<int>(cluster.query_shared_rank(other));
    mine[3] = static_cast<int>(cluster.num_threads());
  }
  cluster.sync();
}

TEST(Ptx, ClusterGroup) {
  Memory<int> out(8);
  group<<<2, 32>>>(out.get());
  const int expected[] = {10, 2, 1, 64, 0, 2, 0, 64};
  for (int i = 0; i < 8; ++i) EXPECT_EQ(out[i], expected[i]) << "result " << i;
}

TEST(TensorMap, IsFoundByName) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  ASSERT_EQ(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result), cudaSuccess);
  EXPECT_EQ(result, cudaDriverEntryPointSuccess);
  EXPECT_EQ(function, reinterpret_cast<void*>(&cuTensorMapEncodeTiled));
  ASSERT_EQ(cudaGetDriverEntryPoint("cuNoSuchThing", &function, cudaEnableDefault, &result), cudaSuccess);
  EXPECT_EQ(result, cudaDriverEntryPointSymbolNotFound);
}

TEST(TensorMap, RefusesWhatTheDriverRefuses) {
  alignas(128) static float data[1024];
  const cuuint64_t size[2] = {32, 32}, stride[1] = {128};
  const cuuint32_t box[2] = {8, 8}, step[2] = {1, 1};
  CUtensorMap map;
  const auto encode = [&](CUtensorMapDataType type, cuuint32_t rank, CUtensorMapSwizzle swizzle,
                          CUtensorMapInterleave interleave, CUtensorMapFloatOOBfill fill, const cuuint32_t* steps) {
    return cuTensorMapEncodeTiled(&map, type, rank, data, size, stride, box, steps, interleave, swizzle,
                                  CU_TENSOR_MAP_L2_PROMOTION_NONE, fill);
  };
  const auto type = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  const auto plain = CU_TENSOR_MAP_SWIZZLE_NONE;
  const auto none = CU_TENSOR_MAP_INTERLEAVE_NONE;
  const auto zero = CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
  const auto nan = CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA;
  EXPECT_EQ(encode(type, 2, plain, none, zero, step), CUDA_SUCCESS);
  EXPECT_EQ(encode(type, 2, CU_TENSOR_MAP_SWIZZLE_32B, none, nan, step), CUDA_SUCCESS);
  EXPECT_EQ(encode(type, 0, plain, none, zero, step), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(encode(type, 6, plain, none, zero, step), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(encode(CU_TENSOR_MAP_DATA_TYPE_INT32, 2, plain, none, nan, step), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(encode(type, 2, plain, CU_TENSOR_MAP_INTERLEAVE_16B, zero, step), CUDA_ERROR_INVALID_VALUE);
  const cuuint32_t far[2] = {1, 9};
  EXPECT_EQ(encode(type, 2, plain, none, zero, far), CUDA_ERROR_INVALID_VALUE);
}

}  // namespace
