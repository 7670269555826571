// Mathematical functions and integer intrinsics. The C library's functions serve where it has them; this file adds what
// only CUDA knows. The fast variants (__expf and so on) are here as exact as the others.
#pragma once

#include <math.h>
#include <stdlib.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kf_simt/types.h"

// glibc declares functions of these names for itself.
#define __expf ::kf::simt::fast_expf
#define __exp10f ::kf::simt::fast_exp10f
#define __logf ::kf::simt::fast_logf
#define __log2f ::kf::simt::fast_log2f
#define __log10f ::kf::simt::fast_log10f
#define __sinf ::kf::simt::fast_sinf
#define __cosf ::kf::simt::fast_cosf
#define __tanf ::kf::simt::fast_tanf
#define __powf ::kf::simt::fast_powf
#define __sincosf ::kf::simt::fast_sincosf
#define __tanhf ::kf::simt::fast_tanhf

#define CUDART_INF_F (::std::numeric_limits<float>::infinity())
#define CUDART_NAN_F (::std::numeric_limits<float>::quiet_NaN())
#define CUDART_INF (::std::numeric_limits<double>::infinity())
#define CUDART_NAN (::std::numeric_limits<double>::quiet_NaN())
#define CUDART_PI_F 3.141592654f
#define CUDART_PI 3.1415926535897931e+0

namespace kf::simt {

template <class To, class From>
To bit_cast_to(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  std::memcpy(static_cast<void*>(&to), &from, sizeof(To));
  return to;
}

inline int __float_as_int(float x) { return bit_cast_to<int>(x); }
inline unsigned __float_as_uint(float x) { return bit_cast_to<unsigned>(x); }
inline float __int_as_float(int x) { return bit_cast_to<float>(x); }
inline float __uint_as_float(unsigned x) { return bit_cast_to<float>(x); }
inline long long __double_as_longlong(double x) { return bit_cast_to<long long>(x); }
inline double __longlong_as_double(long long x) { return bit_cast_to<double>(x); }
inline int __double2hiint(double x) { return static_cast<int>(__double_as_longlong(x) >> 32); }
inline int __double2loint(double x) { return static_cast<int>(__double_as_longlong(x)); }
inline double __hiloint2double(int hi, int lo) {
  const std::uint64_t bits = std::uint64_t{static_cast<unsigned>(hi)} << 32 | static_cast<unsigned>(lo);
  return bit_cast_to<double>(bits);
}

inline float fast_expf(float x) { return expf(x); }
inline float fast_exp10f(float x) { return static_cast<float>(std::pow(10.0, static_cast<double>(x))); }
inline float fast_logf(float x) { return logf(x); }
inline float fast_log2f(float x) { return log2f(x); }
inline float fast_log10f(float x) { return log10f(x); }
inline float fast_sinf(float x) { return sinf(x); }
inline float fast_cosf(float x) { return cosf(x); }
inline float fast_tanf(float x) { return tanf(x); }
inline float fast_tanhf(float x) { return tanhf(x); }
inline float fast_powf(float x, float y) { return powf(x, y); }
inline void fast_sincosf(float x, float* sine, float* cosine) {
  *sine = sinf(x);
  *cosine = cosf(x);
}

inline float rsqrtf(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float rcbrtf(float x) { return static_cast<float>(1.0 / std::cbrt(static_cast<double>(x))); }
inline double rcbrt(double x) { return 1.0 / std::cbrt(x); }
inline float fdividef(float x, float y) { return x / y; }
inline float __fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }  // NaN becomes 0
inline float sinpif(float x) { return static_cast<float>(std::sin(3.14159265358979323846 * x)); }
inline float cospif(float x) { return static_cast<float>(std::cos(3.14159265358979323846 * x)); }
inline double sinpi(double x) { return std::sin(3.14159265358979323846 * x); }
inline double cospi(double x) { return std::cos(3.14159265358979323846 * x); }
inline float normcdff(float x) { return static_cast<float>(0.5 * std::erfc(-0.70710678118654752440 * x)); }
inline double normcdf(double x) { return 0.5 * std::erfc(-0.70710678118654752440 * x); }
inline float rhypotf(float x, float y) { return static_cast<float>(1.0 / std::hypot(double{x}, double{y})); }
inline float norm3df(float x, float y, float z) {
  return static_cast<float>(std::sqrt(double{x} * x + double{y} * y + double{z} * z));
}
inline float norm4df(float x, float y, float z, float w) {
  return static_cast<float>(std::sqrt(double{x} * x + double{y} * y + double{z} * z + double{w} * w));
}

// Rounded to nearest. Compile with -ffp-contract=off where the compiler could make one operation of two.
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dsub_rn(double x, double y) { return x - y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __ddiv_rn(double x, double y) { return x / y; }
inline double __drcp_rn(double x) { return 1.0 / x; }
inline double __dsqrt_rn(double x) { return std::sqrt(x); }
inline double __fma_rn(double x, double y, double z) { return std::fma(x, y, z); }

// A conversion to an integer saturates, and NaN becomes 0.
template <class Int>
Int saturating_cast(double x) {
  if (std::isnan(x)) return 0;
  constexpr double kTop = 2.0 * static_cast<double>(Int{1} << (std::numeric_limits<Int>::digits - 1));  // max + 1
  if (x >= kTop) return std::numeric_limits<Int>::max();
  if (x <= static_cast<double>(std::numeric_limits<Int>::min())) return std::numeric_limits<Int>::min();
  return static_cast<Int>(x);
}
#define KF_SIMT_TO_INTEGER(from, From, to, To)                                                      \
  inline To __##from##2##to##_rn(From x) { return saturating_cast<To>(std::nearbyint(double{x})); } \
  inline To __##from##2##to##_rz(From x) { return saturating_cast<To>(std::trunc(double{x})); }     \
  inline To __##from##2##to##_ru(From x) { return saturating_cast<To>(std::ceil(double{x})); }      \
  inline To __##from##2##to##_rd(From x) { return saturating_cast<To>(std::floor(double{x})); }
KF_SIMT_TO_INTEGER(float, float, int, int)
KF_SIMT_TO_INTEGER(float, float, uint, unsigned)
KF_SIMT_TO_INTEGER(float, float, ll, long long)
KF_SIMT_TO_INTEGER(float, float, ull, unsigned long long)
KF_SIMT_TO_INTEGER(double, double, int, int)
KF_SIMT_TO_INTEGER(double, double, uint, unsigned)
KF_SIMT_TO_INTEGER(double, double, ll, long long)
KF_SIMT_TO_INTEGER(double, double, ull, unsigned long long)
#undef KF_SIMT_TO_INTEGER
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __ll2float_rn(long long x) { return static_cast<float>(x); }
inline float __ull2float_rn(unsigned long long x) { return static_cast<float>(x); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }
inline double __int2double_rn(int x) { return x; }
inline double __uint2double_rn(unsigned x) { return x; }
inline double __ll2double_rn(long long x) { return static_cast<double>(x); }
inline double __ull2double_rn(unsigned long long x) { return static_cast<double>(x); }

// min and max, for floating point without NaN if one of two is a number.
#define KF_SIMT_MIN_MAX(A, B, R)                                                                                      \
  constexpr R min(A a, B b) { return static_cast<R>(b) < static_cast<R>(a) ? static_cast<R>(b) : static_cast<R>(a); } \
  constexpr R max(A a, B b) { return static_cast<R>(a) < static_cast<R>(b) ? static_cast<R>(b) : static_cast<R>(a); }
KF_SIMT_MIN_MAX(int, int, int)
KF_SIMT_MIN_MAX(unsigned, unsigned, unsigned)
KF_SIMT_MIN_MAX(int, unsigned, unsigned)
KF_SIMT_MIN_MAX(unsigned, int, unsigned)
KF_SIMT_MIN_MAX(long, long, long)
KF_SIMT_MIN_MAX(unsigned long, unsigned long, unsigned long)
KF_SIMT_MIN_MAX(long, unsigned long, unsigned long)
KF_SIMT_MIN_MAX(unsigned long, long, unsigned long)
KF_SIMT_MIN_MAX(long long, long long, long long)
KF_SIMT_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
KF_SIMT_MIN_MAX(long long, unsigned long long, unsigned long long)
KF_SIMT_MIN_MAX(unsigned long long, long long, unsigned long long)
#undef KF_SIMT_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return std::fmin(a, b); }
inline double max(double a, double b) { return std::fmax(a, b); }
inline double min(float a, double b) { return std::fmin(double{a}, b); }
inline double max(float a, double b) { return std::fmax(double{a}, b); }
inline double min(double a, float b) { return std::fmin(a, double{b}); }
inline double max(double a, float b) { return std::fmax(a, double{b}); }
constexpr unsigned umin(unsigned a, unsigned b) { return a < b ? a : b; }
constexpr unsigned umax(unsigned a, unsigned b) { return a > b ? a : b; }

constexpr int __popc(unsigned x) { return __builtin_popcount(x); }
constexpr int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
constexpr int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
constexpr int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
constexpr int __ffs(int x) { return __builtin_ffs(x); }
constexpr int __ffsll(long long x) { return __builtin_ffsll(x); }
constexpr unsigned __brev(unsigned x) {
  x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
  x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
  x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
  return __builtin_bswap32(x);
}
constexpr unsigned long long __brevll(unsigned long long x) {
  return std::uint64_t{__brev(static_cast<unsigned>(x))} << 32 | __brev(static_cast<unsigned>(x >> 32));
}
constexpr int __mulhi(int a, int b) { return static_cast<int>((static_cast<long long>(a) * b) >> 32); }
constexpr unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<unsigned long long>(a) * b) >> 32);
}
constexpr long long __mul64hi(long long a, long long b) {
  return static_cast<long long>((static_cast<__int128>(a) * b) >> 64);
}
constexpr unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
constexpr int __mul24(int a, int b) {
  return static_cast<int>((static_cast<long long>(a << 8 >> 8) * (b << 8 >> 8)) & 0xffffffff);
}
constexpr unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffff) * (b & 0xffffff); }
constexpr unsigned __sad(int a, int b, unsigned c) {
  return c + (a > b ? static_cast<unsigned>(a) - static_cast<unsigned>(b)
                    : static_cast<unsigned>(b) - static_cast<unsigned>(a));
}
constexpr unsigned __usad(unsigned a, unsigned b, unsigned c) { return c + (a > b ? a - b : b - a); }
constexpr int __hadd(int a, int b) { return static_cast<int>((static_cast<long long>(a) + b) >> 1); }
constexpr unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const std::uint64_t bytes = std::uint64_t{y} << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned s = selector >> (4 * i) & 0xf;
    unsigned byte = static_cast<unsigned>(bytes >> (8 * (s & 7))) & 0xff;
    if (s & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << (8 * i);
  }
  return result;
}
constexpr unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned shift) {
  return static_cast<unsigned>((std::uint64_t{hi} << 32 | lo) << (shift & 31) >> 32);
}
constexpr unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned shift) {
  return static_cast<unsigned>((std::uint64_t{hi} << 32 | lo) >> (shift & 31));
}
constexpr int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) c += static_cast<signed char>(a >> (8 * i)) * static_cast<signed char>(b >> (8 * i));
  return c;
}
constexpr unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 4; ++i) c += (a >> (8 * i) & 0xff) * (b >> (8 * i) & 0xff);
  return c;
}

inline std::size_t __cvta_generic_to_shared(const void* address) { return reinterpret_cast<std::size_t>(address); }

}  // namespace kf::simt
