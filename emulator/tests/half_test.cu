// float16 and bfloat16: conversions against a slow, independent definition, and arithmetic.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>

#include "memory.h"

namespace {

using test::Memory;

// A format with one sign bit, kExponent bits and kFraction bits, by its definition.
template <int kExponent, int kFraction>
struct Format {
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr int kTop = (1 << kExponent) - 1;

  static double value(unsigned bits) {
    const int exponent = bits >> kFraction & kTop;
    const unsigned fraction = bits & ((1u << kFraction) - 1);
    const double sign = bits >> (kExponent + kFraction) & 1 ? -1.0 : 1.0;
    if (exponent == kTop) return fraction != 0 ? std::nan("") : sign * HUGE_VAL;
    if (exponent == 0) return sign * std::ldexp(fraction, 1 - kBias - kFraction);
    return sign * std::ldexp((1u << kFraction) + fraction, exponent - kBias - kFraction);
  }

  // Round to nearest even: scale so that one unit in the last place is 1, and let the C library round.
  static unsigned bits(double x) {
    const unsigned sign = std::signbit(x) ? 1u << (kExponent + kFraction) : 0;
    const double magnitude = std::fabs(x);
    if (std::isnan(x)) return ~0u;
    const unsigned infinity = static_cast<unsigned>(kTop) << kFraction;
    if (std::isinf(x)) return sign | infinity;
    int exponent = magnitude == 0 ? 1 - kBias : std::ilogb(magnitude);
    if (exponent < 1 - kBias) exponent = 1 - kBias;
    const double units = std::nearbyint(std::ldexp(magnitude, kFraction - exponent));
    const double rounded = std::ldexp(units, exponent - kFraction);
    if (rounded >= std::ldexp(1.0, kBias + 1)) return sign | infinity;
    if (rounded < std::ldexp(1.0, 1 - kBias)) return sign | static_cast<unsigned>(units);
    const int e = std::ilogb(rounded);
    const auto fraction = static_cast<unsigned>(std::ldexp(rounded, kFraction - e)) - (1u << kFraction);
    return sign | static_cast<unsigned>(e + kBias) << kFraction | fraction;
  }
};
using HalfFormat = Format<5, 10>;
using BfloatFormat = Format<8, 7>;

bool same_float(float a, double b) {
  if (std::isnan(b)) return std::isnan(a);
  return static_cast<double>(a) == b && std::signbit(a) == std::signbit(b);
}

template <class Reference>
void check_from_float(unsigned short (*convert)(float), float x) {
  const unsigned expected = Reference::bits(x);
  const unsigned got = convert(x);
  if (expected == ~0u) {
    ASSERT_TRUE(std::isnan(Reference::value(got))) << x;
  } else {
    ASSERT_EQ(got, expected) << std::hexfloat << x;
  }
}

unsigned short to_half(float x) { return __half_as_ushort(__float2half_rn(x)); }
unsigned short to_bfloat(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }

TEST(Half, ToFloatAndBackAllPatterns) {
  for (unsigned bits = 0; bits < 65536; ++bits) {
    const auto pattern = static_cast<unsigned short>(bits);
    const float h = __half2float(__ushort_as_half(pattern)), b = __bfloat162float(__ushort_as_bfloat16(pattern));
    ASSERT_TRUE(same_float(h, HalfFormat::value(bits))) << bits;
    ASSERT_TRUE(same_float(b, BfloatFormat::value(bits))) << bits;
    check_from_float<HalfFormat>(to_half, h);
    check_from_float<BfloatFormat>(to_bfloat, b);
  }
}

template <class Reference>
void check_ties(unsigned short (*convert)(float)) {
  for (unsigned bits = 0; bits < 65535; ++bits) {
    const double low = Reference::value(bits), high = Reference::value(bits + 1);
    if (!std::isfinite(low) || std::isnan(high)) continue;
    // Beyond the largest finite value the tie is where the next one would be.
    const double next = std::isinf(high) ? 2 * low - Reference::value(bits - 1) : high;
    const auto tie = static_cast<float>((low + next) / 2);
    for (const float x : {tie, std::nextafter(tie, -HUGE_VALF), std::nextafter(tie, HUGE_VALF), static_cast<float>(low),
                          std::nextafter(static_cast<float>(low), HUGE_VALF)}) {
      check_from_float<Reference>(convert, x);
    }
  }
  std::mt19937 random(1);
  for (int i = 0; i < 2000000; ++i) {
    const std::uint32_t word = random();
    float x;
    std::memcpy(&x, &word, 4);
    check_from_float<Reference>(convert, x);
  }
}

TEST(Half, FromFloatAroundEveryTie) {
  check_ties<HalfFormat>(to_half);
  check_ties<BfloatFormat>(to_bfloat);
}

TEST(Half, FromDoubleRoundsOnce) {
  std::mt19937_64 random(2);
  for (unsigned bits = 0x0001; bits < 0x7bff; ++bits) {
    const double tie = (HalfFormat::value(bits) + HalfFormat::value(bits + 1)) / 2;
    for (const double x : {tie, std::nextafter(tie, 0.0), std::nextafter(tie, HUGE_VAL), -tie}) {
      ASSERT_EQ(__half_as_ushort(__double2half(x)), HalfFormat::bits(x)) << std::hexfloat << x;
    }
    const double b_tie = (BfloatFormat::value(bits) + BfloatFormat::value(bits + 1)) / 2;
    for (const double x : {b_tie, std::nextafter(b_tie, 0.0), std::nextafter(b_tie, HUGE_VAL)}) {
      ASSERT_EQ(__bfloat16_as_ushort(__double2bfloat16(x)), BfloatFormat::bits(x)) << std::hexfloat << x;
    }
  }
}

// The exact result, rounded once.
template <class T, class Reference>
void check_arithmetic(T (*make)(unsigned short), unsigned short (*bits_of)(T)) {
  std::mt19937 random(3);
  for (int i = 0; i < 300000; ++i) {
    const auto pa = static_cast<unsigned short>(random()), pb = static_cast<unsigned short>(random());
    const T a = make(pa), b = make(pb);
    const double x = Reference::value(pa), y = Reference::value(pb);
    const auto check = [&](T got, double exact, const char* what) {
      const unsigned expected = Reference::bits(exact);
      if (expected == ~0u) {
        ASSERT_TRUE(__hisnan(got)) << what << x << " " << y;
      } else {
        ASSERT_EQ(bits_of(got), expected) << what << " " << std::hexfloat << x << " " << y;
      }
    };
    check(__hmul(a, b), x * y, "mul");
    check(__hneg(a), -x, "neg");
    check(__habs(a), std::fabs(x), "abs");
    // The double sum and quotient are inexact only far from any tie.
    check(__hadd(a, b), x + y, "add");
    check(__hsub(a, b), x - y, "sub");
    check(__hdiv(a, b), x / y, "div");
    if (!std::isnan(x) && !std::isnan(y)) {
      ASSERT_EQ(__hlt(a, b), x < y);
      ASSERT_EQ(__hge(a, b), x >= y);
      ASSERT_EQ(__heq(a, b), x == y);
    } else {
      ASSERT_FALSE(__hlt(a, b) || __hge(a, b) || __heq(a, b) || __hne(a, b));
      ASSERT_TRUE(__hltu(a, b) && __hneu(a, b));
    }
  }
}

TEST(Half, Arithmetic) {
  check_arithmetic<__half, HalfFormat>([](unsigned short p) { return __ushort_as_half(p); },
                                       [](__half h) { return __half_as_ushort(h); });
  check_arithmetic<__nv_bfloat16, BfloatFormat>([](unsigned short p) { return __ushort_as_bfloat16(p); },
                                                [](__nv_bfloat16 b) { return __bfloat16_as_ushort(b); });
}

TEST(Half, FusedMultiplyAddRoundsOnce) {
  // 1·x + c where c decides a tie, from far below.
  const __half one = __float2half(1.0f), x = __float2half(1.0f + 0x1p-10f);
  const __half factor = __float2half(1.0f + 0x1p-1f);
  const double product = (1.0 + 0x1p-10) * 1.5;  // between two halves, at the tie
  const __half tiny = __ushort_as_half(1), minus_tiny = __ushort_as_half(0x8001);
  EXPECT_EQ(__half2float(__hfma(x, factor, tiny)),
            static_cast<float>(HalfFormat::value(HalfFormat::bits(product + 0x1p-24))));
  EXPECT_EQ(__half2float(__hfma(x, factor, minus_tiny)),
            static_cast<float>(HalfFormat::value(HalfFormat::bits(product - 0x1p-24))));
  EXPECT_NE(__half2float(__hfma(x, factor, tiny)), __half2float(__hfma(x, factor, minus_tiny)));
  EXPECT_EQ(__half2float(__hfma(one, one, one)), 2.0f);
}

TEST(Half, Integers) {
  EXPECT_EQ(__half2int_rn(__float2half(2.5f)), 2);
  EXPECT_EQ(__half2int_rz(__float2half(-2.75f)), -2);
  EXPECT_EQ(__half2int_ru(__float2half(2.25f)), 3);
  EXPECT_EQ(__half2int_rd(__float2half(-2.25f)), -3);
  EXPECT_EQ(__half2ushort_rn(__float2half(-1.0f)), 0);
  EXPECT_EQ(__half2int_rn(__ushort_as_half(0x7fff)), 0);
  EXPECT_EQ(__half2float(__int2half_rn(2049)), 2048.0f);
  EXPECT_EQ(__half2float(__int2half_rn(2051)), 2052.0f);
  EXPECT_TRUE(__hisinf(__int2half_rn(70000)));
  EXPECT_EQ(__bfloat162float(__ll2bfloat16_rn((1LL << 62) + 1)), 0x1p62f);
  EXPECT_EQ(__bfloat162float(__ull2bfloat16_rn((0x81ULL << 56) | (1ULL << 55) | 1)), 0x1.04p63f);
}

__global__ void operators(float* out) {
  const __half a = 3.0f, b = 2.0f;
  __half c = a;
  c += b;
  out[0] = c;
  out[1] = a - b;
  out[2] = a * b;
  out[3] = a / b;
  out[4] = -a;
  out[5] = (a > b) + (a == a) + (a != b) + (b <= a);
  const __half2 v = __floats2half2_rn(1.0f, 2.0f), w = __half2half2(b);
  const __half2 sum = __hfma2(v, w, w);
  out[6] = __low2float(sum);
  out[7] = __high2float(sum);
  const float2 f = __half22float2(v * w + v);
  out[8] = f.x + f.y;
  const __nv_bfloat162 p = __floats2bfloat162_rn(1.5f, -2.0f);
  out[9] = __bfloat162float(__hadd(p.x, p.y));
  out[10] = __bfloat1622float2(__hmax2(p, __bfloat162bfloat162(__float2bfloat16(0.0f)))).y;
  out[11] = __half2float(hexp(__float2half(0.0f))) + __half2float(hsqrt(__float2half(4.0f)));
  out[12] = __half2float(__hmax(__ushort_as_half(0x7e00), a));
  out[13] = __hisnan(__hmax_nan(__ushort_as_half(0x7e00), a));
  out[14] = sizeof(__half2) == 4 && alignof(__half2) == 4 && sizeof(__nv_bfloat16) == 2;
}

TEST(Half, OperatorsAndPairs) {
  Memory<float> out(15);
  operators<<<1, 1>>>(out.get());
  const float expected[] = {5, 1, 6, 1.5, -3, 4, 4, 6, 9, -0.5, 0, 3, 3, 1, 1};
  for (int i = 0; i < 15; ++i) EXPECT_EQ(out[i], expected[i]) << i;
}

}  // namespace
