// __nv_bfloat16 and __nv_bfloat162 with conversions of their own. See emulator/README.md.
#pragma once

#include "cuda_runtime.h"
#include "kf_simt/half_ops.h"

namespace kf::simt {

struct alignas(2) __nv_bfloat16_raw {
  unsigned short x;
};

struct alignas(2) __nv_bfloat16 {
  std::uint16_t bits;

  static __nv_bfloat16 from_bits(std::uint16_t bits) {
    __nv_bfloat16 h;
    h.bits = bits;
    return h;
  }
  static std::uint16_t to_bits(__nv_bfloat16 h) { return h.bits; }
  static __nv_bfloat16 from_float(float x) { return from_bits(float_to_bfloat16(x)); }
  static __nv_bfloat16 from_double(double x) { return from_bits(double_to_bfloat16(x)); }
  static float to_float(__nv_bfloat16 h) { return bfloat16_to_float(h.bits); }
  template <class Int>
  static __nv_bfloat16 from_integer(Int x) {
    return from_double(integer_to_odd(x));
  }

  __nv_bfloat16() = default;
  __nv_bfloat16(const __nv_bfloat16_raw& raw) : bits(raw.x) {}
  operator __nv_bfloat16_raw() const { return {bits}; }
#ifndef __CUDA_NO_BFLOAT16_CONVERSIONS__
  __nv_bfloat16(float x) : bits(float_to_bfloat16(x)) {}
  __nv_bfloat16(double x) : bits(double_to_bfloat16(x)) {}
  __nv_bfloat16(short x) : __nv_bfloat16(from_integer(x)) {}
  __nv_bfloat16(unsigned short x) : __nv_bfloat16(from_integer(x)) {}
  __nv_bfloat16(int x) : __nv_bfloat16(from_integer(x)) {}
  __nv_bfloat16(unsigned x) : __nv_bfloat16(from_integer(x)) {}
  __nv_bfloat16(long x) : __nv_bfloat16(from_integer(x)) {}
  __nv_bfloat16(unsigned long x) : __nv_bfloat16(from_integer(x)) {}
  __nv_bfloat16(long long x) : __nv_bfloat16(from_integer(x)) {}
  __nv_bfloat16(unsigned long long x) : __nv_bfloat16(from_integer(x)) {}
  operator float() const { return bfloat16_to_float(bits); }
#endif
};

struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
  __nv_bfloat162() = default;
  __nv_bfloat162(__nv_bfloat16 x_, __nv_bfloat16 y_) : x(x_), y(y_) {}
};

using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

KF_SIMT_HALF_TYPE(__nv_bfloat16, __nv_bfloat162)
#ifndef __CUDA_NO_BFLOAT16_OPERATORS__
KF_SIMT_HALF_OPERATORS(__nv_bfloat16)
#endif
#ifndef __CUDA_NO_BFLOAT162_OPERATORS__
KF_SIMT_HALF2_OPERATORS(__nv_bfloat162)
#endif
KF_SIMT_HALF_INTEGERS(__nv_bfloat16, bfloat16)
KF_SIMT_HALF_ROUNDINGS(__nv_bfloat16, bfloat16, float_to_bfloat16, bfloat16_to_float)

inline float __bfloat162float(__nv_bfloat16 a) { return __nv_bfloat16::to_float(a); }
inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16::from_float(x); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16::from_float(x); }
inline __nv_bfloat16 __double2bfloat16(double x) { return __nv_bfloat16::from_double(x); }
inline __nv_bfloat162 __float2bfloat162_rn(float x) { return {__float2bfloat16(x), __float2bfloat16(x)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16(x), __float2bfloat16(y)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {__float2bfloat16(v.x), __float2bfloat16(v.y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {__bfloat162float(v.x), __bfloat162float(v.y)}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 a) { return {a, a}; }
inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 a) { return a.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 a) { return a.y; }
inline __nv_bfloat162 __low2bfloat162(__nv_bfloat162 a) { return {a.x, a.x}; }
inline __nv_bfloat162 __high2bfloat162(__nv_bfloat162 a) { return {a.y, a.y}; }
inline __nv_bfloat162 __lows2bfloat162(__nv_bfloat162 a, __nv_bfloat162 b) { return {a.x, b.x}; }
inline __nv_bfloat162 __highs2bfloat162(__nv_bfloat162 a, __nv_bfloat162 b) { return {a.y, b.y}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }
inline short __bfloat16_as_short(__nv_bfloat16 a) { return static_cast<short>(a.bits); }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 a) { return a.bits; }
inline __nv_bfloat16 __short_as_bfloat16(short bits) {
  return __nv_bfloat16::from_bits(static_cast<std::uint16_t>(bits));
}
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return __nv_bfloat16::from_bits(bits); }

// What the rewriter puts into a cast.
template <class To>
auto kf_integer(__nv_bfloat16 x) {
  return half_to_integer<To>(x);
}

}  // namespace kf::simt
