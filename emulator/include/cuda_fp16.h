// __half and __half2 with conversions of their own. See emulator/README.md.
#pragma once

#include "cuda_runtime.h"
#include "kf_simt/half_ops.h"

namespace kf::simt {

struct alignas(2) __half_raw {
  unsigned short x;
};

struct alignas(2) __half {
  std::uint16_t bits;

  static __half from_bits(std::uint16_t bits) {
    __half h;
    h.bits = bits;
    return h;
  }
  static std::uint16_t to_bits(__half h) { return h.bits; }
  static __half from_float(float x) { return from_bits(float_to_half(x)); }
  static __half from_double(double x) { return from_bits(double_to_half(x)); }
  static float to_float(__half h) { return half_to_float(h.bits); }
  template <class Int>
  static __half from_integer(Int x) {
    return from_double(integer_to_odd(x));
  }

  __half() = default;
  __half(const __half_raw& raw) : bits(raw.x) {}
  operator __half_raw() const { return {bits}; }
#ifndef __CUDA_NO_HALF_CONVERSIONS__
  __half(float x) : bits(float_to_half(x)) {}
  __half(double x) : bits(double_to_half(x)) {}
  __half(short x) : __half(from_integer(x)) {}
  __half(unsigned short x) : __half(from_integer(x)) {}
  __half(int x) : __half(from_integer(x)) {}
  __half(unsigned x) : __half(from_integer(x)) {}
  __half(long x) : __half(from_integer(x)) {}
  __half(unsigned long x) : __half(from_integer(x)) {}
  __half(long long x) : __half(from_integer(x)) {}
  __half(unsigned long long x) : __half(from_integer(x)) {}
  operator float() const { return half_to_float(bits); }
#endif
};

struct alignas(4) __half2 {
  __half x, y;
  __half2() = default;
  __half2(__half x_, __half y_) : x(x_), y(y_) {}
};

using half = __half;
using half2 = __half2;
using nv_half = __half;
using nv_half2 = __half2;
using __nv_half = __half;

KF_SIMT_HALF_TYPE(__half, __half2)
#ifndef __CUDA_NO_HALF_OPERATORS__
KF_SIMT_HALF_OPERATORS(__half)
#endif
#ifndef __CUDA_NO_HALF2_OPERATORS__
KF_SIMT_HALF2_OPERATORS(__half2)
#endif
KF_SIMT_HALF_INTEGERS(__half, half)
KF_SIMT_HALF_ROUNDINGS(__half, half, float_to_half, half_to_float)

inline float __half2float(__half a) { return __half::to_float(a); }
inline __half __float2half(float x) { return __half::from_float(x); }
inline __half __float2half_rn(float x) { return __half::from_float(x); }
inline __half __double2half(double x) { return __half::from_double(x); }
inline __half2 __float2half2_rn(float x) { return {__float2half(x), __float2half(x)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half(x), __float2half(y)}; }
inline __half2 __float22half2_rn(float2 v) { return {__float2half(v.x), __float2half(v.y)}; }
inline float2 __half22float2(__half2 v) { return {__half2float(v.x), __half2float(v.y)}; }
inline __half2 __half2half2(__half a) { return {a, a}; }
inline __half2 make_half2(__half x, __half y) { return {x, y}; }
inline short __half_as_short(__half a) { return static_cast<short>(a.bits); }
inline unsigned short __half_as_ushort(__half a) { return a.bits; }
inline __half __short_as_half(short bits) { return __half::from_bits(static_cast<std::uint16_t>(bits)); }
inline __half __ushort_as_half(unsigned short bits) { return __half::from_bits(bits); }

// What the rewriter puts into a cast.
template <class To>
auto kf_integer(__half x) {
  return half_to_integer<To>(x);
}

}  // namespace kf::simt
