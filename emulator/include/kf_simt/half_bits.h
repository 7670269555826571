// Conversions between float or double and the bits of float16 and bfloat16: round to nearest even, NaN stays NaN.
#pragma once

#include <cmath>
#include <cstdint>

#include "kf_simt/math.h"

namespace kf::simt {

constexpr std::uint16_t kHalfNan = 0x7fff;  // what a GPU makes of any NaN, in both formats

inline float half_to_float(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000) << 16;
  const std::uint32_t rest = h & 0x7fff;
  std::uint32_t bits;
  if (rest >= 0x7c00) {
    bits = 0x7f800000u | (rest & 0x3ff) << 13;
  } else if (rest >= 0x400) {
    bits = (rest << 13) + (112u << 23);
  } else {
    bits = __float_as_uint(static_cast<float>(rest) * 0x1p-24f);  // subnormal, or zero
  }
  return __uint_as_float(sign | bits);
}

inline std::uint16_t float_to_half(float x) {
  std::uint32_t bits = __float_as_uint(x);
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000);
  bits &= 0x7fffffffu;
  if (bits >= 0x47800000u) return bits > 0x7f800000u ? kHalfNan : sign | 0x7c00;  // NaN, or 65536 and more
  if (bits < 0x38800000u) {
    // Below 2^-14 the result is subnormal. Next to 0.5 a float's last bit is worth 2^-24, as a subnormal half's is, so
    // this addition rounds where it should.
    const float shifted = __uint_as_float(bits) + 0.5f;
    return static_cast<std::uint16_t>(sign | (__float_as_uint(shifted) - 0x3f000000u));
  }
  const std::uint32_t odd = bits >> 13 & 1;
  bits = bits - (112u << 23) + 0xfffu + odd;  // a carry into the exponent is right, up to infinity
  return static_cast<std::uint16_t>(sign | bits >> 13);
}

inline float bfloat16_to_float(std::uint16_t b) { return __uint_as_float(static_cast<std::uint32_t>(b) << 16); }

inline std::uint16_t float_to_bfloat16(float x) {
  const std::uint32_t bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return kHalfNan;
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

// The float between which and x no half lies, and which is no tie unless x is one: rounded to odd.
inline float round_to_odd(double x) {
  float f = static_cast<float>(x);
  const double back = f;
  if (back == x || std::isnan(x)) return f;
  if (std::fabs(back) > std::fabs(x)) f = std::nextafter(f, 0.0f);  // towards zero, then set the last bit
  return __uint_as_float(__float_as_uint(f) | 1u);
}
inline std::uint16_t double_to_half(double x) { return float_to_half(round_to_odd(x)); }
inline std::uint16_t double_to_bfloat16(double x) { return float_to_bfloat16(round_to_odd(x)); }

// A 16-bit float beside x, rounded in a direction; `back` is what the nearest one stands for.
inline std::uint16_t rounded_bits(std::uint16_t nearest, double back, double x, RoundingDirection direction) {
  const bool up = direction == RoundingDirection::kUp || (direction == RoundingDirection::kZero && x < 0);
  if (up ? !(x > back) : !(x < back)) return nearest;
  if ((nearest & 0x7fff) == 0) return up ? 0x0001 : 0x8001;
  const bool positive = (nearest & 0x8000) == 0;
  return static_cast<std::uint16_t>(positive == up ? nearest + 1 : nearest - 1);
}

// An integer as a double. One of more than 53 bits is rounded to odd.
template <class Int>
double integer_to_odd(Int x) {
  if constexpr (sizeof(Int) == 8) {
    constexpr Int kLimit = Int{1} << 53, kLow = 0x7ff;
    const bool beyond = std::is_signed_v<Int> ? x > kLimit || x < 0 - kLimit : x > kLimit;
    if (beyond && (x & kLow) != 0) x = (x & ~kLow) | (kLow + 1);
  }
  return static_cast<double>(x);
}

// a·b + c for factors of at most 11 bits, rounded to odd: the product is exact, the sum's error is known exactly.
inline double fma_to_odd(float a, float b, float c) {
  const double product = double{a} * double{b};
  const double sum = product + double{c};
  if (!std::isfinite(sum)) return sum;
  const double part = sum - product;
  const double error = (product - (sum - part)) + (double{c} - part);
  if (error == 0 || (__double_as_longlong(sum) & 1) != 0) return sum;
  return std::nextafter(sum, error > 0 ? HUGE_VAL : -HUGE_VAL);
}

}  // namespace kf::simt
