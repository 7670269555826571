// Mathematical functions and integer intrinsics. The C library's functions serve where it has them; this file adds what
// only CUDA knows. The fast variants (__expf and so on) are as exact as the others where CUDA bounds their error, and
// have an H200's results where it does not: far from zero, and for infinity, zero and NaN.
#pragma once

#include <math.h>
#include <stdlib.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kf_simt/device.h"
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

#define CUDART_MAX_NORMAL_F (::std::numeric_limits<float>::max())
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
// The error of sines and cosines is bounded from -π to π. Beyond, a GPU multiplies by a float 1/2π and drops the last
// bits, and so with them the whole turns: of x = 10⁵ the second digit is wrong, from about 10⁸ on each x is a whole
// turn.
inline double kf_angle(float x) {
  if (std::fabs(x) <= 3.14159274f) return double{x};
  const double turns = double{x} * double{0.15915494309189535f};
  auto dropped = static_cast<float>(turns);
  if (std::fabs(double{dropped}) > std::fabs(turns)) dropped = std::nextafter(dropped, 0.0f);
  return 6.28318530717958647693 * std::remainder(double{dropped}, 1.0);
}
inline float fast_sinf(float x) { return static_cast<float>(std::sin(kf_angle(x))); }
inline float fast_cosf(float x) { return static_cast<float>(std::cos(kf_angle(x))); }
inline float fast_tanf(float x) { return static_cast<float>(std::tan(kf_angle(x))); }
inline float fast_tanhf(float x) { return tanhf(x); }
// 2 to the power of y·log2(x): NaN for every x < 0, and where that product is one, as for x = y = 0.
inline float fast_powf(float x, float y) {
  const float exponent = y * log2f(x);
  return x > 0 && !std::isnan(exponent) ? powf(x, y) : exp2f(exponent);
}
inline void fast_sincosf(float x, float* sine, float* cosine) {
  *sine = fast_sinf(x);
  *cosine = fast_cosf(x);
}

inline float rsqrtf(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float rcbrtf(float x) { return static_cast<float>(1.0 / std::cbrt(static_cast<double>(x))); }
inline double rcbrt(double x) { return 1.0 / std::cbrt(x); }
inline float fdividef(float x, float y) { return x / y; }
// x times the reciprocal of y, which is 0 beyond 2¹²⁶: then the quotient is 0, and NaN for an infinite x.
inline float __fdividef(float x, float y) {
  const bool beyond = std::fabs(y) > 0x1p126f && !std::isinf(y);
  return beyond ? x * std::copysign(0.0f, y) : x / y;
}
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

inline double norm3d(double x, double y, double z) { return std::sqrt(x * x + y * y + z * z); }
inline double norm4d(double x, double y, double z, double w) { return std::sqrt(x * x + y * y + z * z + w * w); }
inline float rnorm3df(float x, float y, float z) { return 1.0f / norm3df(x, y, z); }
inline float rnorm4df(float x, float y, float z, float w) { return 1.0f / norm4df(x, y, z, w); }
inline double rnorm3d(double x, double y, double z) { return 1.0 / norm3d(x, y, z); }
inline double rhypot(double x, double y) { return 1.0 / std::hypot(x, y); }
inline double norm(int count, const double* x) {
  double sum = 0;
  for (int i = 0; i < count; ++i) sum += x[i] * x[i];
  return std::sqrt(sum);
}
inline float normf(int count, const float* x) {
  double sum = 0;
  for (int i = 0; i < count; ++i) sum += double{x[i]} * x[i];
  return static_cast<float>(std::sqrt(sum));
}
inline void sincospi(double x, double* sine, double* cosine) {
  *sine = sinpi(x);
  *cosine = cospi(x);
}
inline void sincospif(float x, float* sine, float* cosine) {
  *sine = sinpif(x);
  *cosine = cospif(x);
}
// The inverse of erfc by Newton's method, from a start that is right to four digits.
inline double erfcinv(double y) {
  if (!(y > 0 && y < 2)) return y == 0 ? HUGE_VAL : y == 2 ? -HUGE_VAL : std::numeric_limits<double>::quiet_NaN();
  if (y == 1) return 0;
  const double small = y < 1 ? y : 2 - y;
  const double t = std::sqrt(-2 * std::log(small / 2));
  double x = 0.70710678118654752440 *
             (t - (2.515517 + t * (0.802853 + t * 0.010328)) / (1 + t * (1.432788 + t * (0.189269 + t * 0.001308))));
  for (int i = 0; i < 3; ++i) {
    const double error = (std::erfc(x) - small) / (1.12837916709551257390 * std::exp(-x * x));
    x += error / (1 + x * error);  // Halley's correction
  }
  return y < 1 ? x : -x;
}
inline double erfinv(double y) { return std::fabs(y) < 1e-9 ? 0.88622692545275801365 * y : erfcinv(1 - y); }
inline double normcdfinv(double p) { return -1.41421356237309504880 * erfcinv(2 * p); }
inline float erfcinvf(float y) { return static_cast<float>(erfcinv(y)); }
inline float erfinvf(float y) { return static_cast<float>(erfinv(y)); }
inline float normcdfinvf(float p) { return static_cast<float>(normcdfinv(p)); }

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

// Rounded in a direction: of the exact result we know a neighbour, and on which side of it the result lies.
enum class RoundingDirection { kZero, kUp, kDown };
template <class T>
T rounded(T neighbour, T error, RoundingDirection direction) {
  constexpr T kInfinity = std::numeric_limits<T>::infinity();
  const bool up =
      direction == RoundingDirection::kUp || (direction == RoundingDirection::kZero && std::signbit(neighbour));
  if (up && error > 0) return std::nextafter(neighbour, kInfinity);
  if (!up && error < 0) return std::nextafter(neighbour, -kInfinity);
  return neighbour;
}
// The float beside value + rest, where the rest is what the double `value` lacks.
inline float rounded_to_float(double value, double rest, RoundingDirection direction) {
  const auto neighbour = static_cast<float>(value);
  const double error = (value - double{neighbour}) + rest;
  return rounded(neighbour, error > 0 ? 1.0f : error < 0 ? -1.0f : 0.0f, direction);
}
inline double sum_error(double x, double y) {
  const double sum = x + y, part = sum - x;
  return (x - (sum - part)) + (y - part);
}
// Downwards, a sum that cancels to zero is -0.
template <class T>
T zero_of_sum(double x, double y, T sum, RoundingDirection direction) {
  const bool cancels = x + y == 0 && (std::signbit(x) || std::signbit(y));
  return direction == RoundingDirection::kDown && cancels ? -T{0} : sum;
}
inline double quotient_error(double x, double y) { return std::fma(-(x / y), y, x) / y; }
inline double root_error(double x) {
  const double root = std::sqrt(x);
  return root > 0 ? std::fma(-root, root, x) / (2 * root) : 0;
}
template <class To, class From>
To integer_rounded(From x, RoundingDirection direction) {
  const auto neighbour = static_cast<To>(x);
  const long double error = static_cast<long double>(x) - static_cast<long double>(neighbour);
  return rounded(neighbour, error > 0 ? To{1} : error < 0 ? To{-1} : To{0}, direction);
}
#define KF_SIMT_ROUNDED(r, direction)                                                                            \
  inline float __fadd_##r(float x, float y) {                                                                    \
    return zero_of_sum(x, y, rounded_to_float(double{x} + y, sum_error(x, y), direction), direction);            \
  }                                                                                                              \
  inline float __fsub_##r(float x, float y) { return __fadd_##r(x, -y); }                                        \
  inline float __fmul_##r(float x, float y) { return rounded_to_float(double{x} * y, 0, direction); }            \
  inline float __fmaf_##r(float x, float y, float z) {                                                           \
    const double product = double{x} * y;                                                                        \
    return zero_of_sum(product, z, rounded_to_float(product + z, sum_error(product, z), direction), direction);  \
  }                                                                                                              \
  inline float __fdiv_##r(float x, float y) {                                                                    \
    return rounded_to_float(double{x} / y, quotient_error(x, y), direction);                                     \
  }                                                                                                              \
  inline float __frcp_##r(float x) { return __fdiv_##r(1.0f, x); }                                               \
  inline float __fsqrt_##r(float x) { return rounded_to_float(std::sqrt(double{x}), root_error(x), direction); } \
  inline double __dadd_##r(double x, double y) {                                                                 \
    return zero_of_sum(x, y, rounded(x + y, sum_error(x, y), direction), direction);                             \
  }                                                                                                              \
  inline double __dsub_##r(double x, double y) { return __dadd_##r(x, -y); }                                     \
  inline double __dmul_##r(double x, double y) { return rounded(x * y, std::fma(x, y, -(x * y)), direction); }   \
  inline double __ddiv_##r(double x, double y) { return rounded(x / y, quotient_error(x, y), direction); }       \
  inline double __drcp_##r(double x) { return __ddiv_##r(1.0, x); }                                              \
  inline double __dsqrt_##r(double x) { return rounded(std::sqrt(x), root_error(x), direction); }                \
  inline float __double2float_##r(double x) { return rounded_to_float(x, 0, direction); }                        \
  inline float __int2float_##r(int x) { return integer_rounded<float>(x, direction); }                           \
  inline float __uint2float_##r(unsigned x) { return integer_rounded<float>(x, direction); }                     \
  inline float __ll2float_##r(long long x) { return integer_rounded<float>(x, direction); }                      \
  inline float __ull2float_##r(unsigned long long x) { return integer_rounded<float>(x, direction); }            \
  inline double __ll2double_##r(long long x) { return integer_rounded<double>(x, direction); }                   \
  inline double __ull2double_##r(unsigned long long x) { return integer_rounded<double>(x, direction); }
KF_SIMT_ROUNDED(rz, RoundingDirection::kZero)
KF_SIMT_ROUNDED(ru, RoundingDirection::kUp)
KF_SIMT_ROUNDED(rd, RoundingDirection::kDown)
#undef KF_SIMT_ROUNDED

// A conversion to an integer saturates. NaN becomes 0, but of a double, or as an integer of 64 bits, only its first bit
// is set: so says the PTX manual, and so does a GPU.
template <class Int>
Int saturating_cast(double x, bool of_double = false) {
  if (std::isnan(x)) return of_double || sizeof(Int) == 8 ? static_cast<Int>(1ull << (8 * sizeof(Int) - 1)) : Int{0};
  constexpr double kTop = 2.0 * static_cast<double>(Int{1} << (std::numeric_limits<Int>::digits - 1));  // max + 1
  if (x >= kTop) return std::numeric_limits<Int>::max();
  if (x <= static_cast<double>(std::numeric_limits<Int>::min())) return std::numeric_limits<Int>::min();
  return static_cast<Int>(x);
}
#define KF_SIMT_TO_INTEGER(from, From, to, To)                                                                      \
  inline To __##from##2##to##_rn(From x) { return saturating_cast<To>(std::nearbyint(double{x}), sizeof(x) == 8); } \
  inline To __##from##2##to##_rz(From x) { return saturating_cast<To>(std::trunc(double{x}), sizeof(x) == 8); }     \
  inline To __##from##2##to##_ru(From x) { return saturating_cast<To>(std::ceil(double{x}), sizeof(x) == 8); }      \
  inline To __##from##2##to##_rd(From x) { return saturating_cast<To>(std::floor(double{x}), sizeof(x) == 8); }
KF_SIMT_TO_INTEGER(float, float, int, int)
KF_SIMT_TO_INTEGER(float, float, uint, unsigned)
KF_SIMT_TO_INTEGER(float, float, ll, long long)
KF_SIMT_TO_INTEGER(float, float, ull, unsigned long long)
KF_SIMT_TO_INTEGER(double, double, int, int)
KF_SIMT_TO_INTEGER(double, double, uint, unsigned)
KF_SIMT_TO_INTEGER(double, double, ll, long long)
KF_SIMT_TO_INTEGER(double, double, ull, unsigned long long)
#undef KF_SIMT_TO_INTEGER

// The rewriter puts kf_integer<To>(…) into each cast of device code to an integer type. What has no place in that type
// becomes what a GPU makes of it: it converts to 32 bits, or 64, and takes the low bits. Where a function is the host's
// too, the host gets the host's result. All but floating-point numbers pass through.
template <class To>
using KfWide = std::conditional_t<sizeof(To) >= 4, To, std::conditional_t<std::is_signed_v<To>, int, unsigned>>;
template <class To, class From>
[[gnu::cold, gnu::noinline]] To kf_integer_beyond(From x) {
  if (on_device()) return static_cast<To>(saturating_cast<KfWide<To>>(double{x}, sizeof(x) == 8));
  return static_cast<To>(x);
}
template <class To, class From, std::enable_if_t<!std::is_class_v<From> && !std::is_reference_v<To>, int> = 0>
[[gnu::always_inline, gnu::artificial]] constexpr auto kf_integer(From x) {
  constexpr bool from_floating = std::is_same_v<From, float> || std::is_same_v<From, double>;
  if constexpr (from_floating && std::is_integral_v<To> && !std::is_same_v<std::remove_cv_t<To>, bool>) {
    using Int = std::remove_cv_t<To>;
    constexpr auto kTop = From{2} * static_cast<From>(KfWide<Int>{1} << (std::numeric_limits<KfWide<Int>>::digits - 1));
    constexpr auto kBottom = std::is_signed_v<Int> ? -kTop : From{0};
    return x >= kBottom && x < kTop ? static_cast<Int>(static_cast<KfWide<Int>>(x)) : kf_integer_beyond<Int>(x);
  } else {
    return x;
  }
}
template <class To, class From,
          std::enable_if_t<std::is_class_v<std::remove_reference_t<From>> || std::is_reference_v<To>, int> = 0>
[[gnu::always_inline, gnu::artificial]] constexpr From&& kf_integer(From&& x) {
  return static_cast<From&&>(x);
}
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
#define KF_SIMT_MIN_MAX_PAIRS(Signed, Unsigned) \
  KF_SIMT_MIN_MAX(Signed, Signed, Signed)       \
  KF_SIMT_MIN_MAX(Unsigned, Unsigned, Unsigned) \
  KF_SIMT_MIN_MAX(Signed, Unsigned, Unsigned)   \
  KF_SIMT_MIN_MAX(Unsigned, Signed, Unsigned)
KF_SIMT_MIN_MAX_PAIRS(int, unsigned)
KF_SIMT_MIN_MAX_PAIRS(long, unsigned long)
KF_SIMT_MIN_MAX_PAIRS(long long, unsigned long long)
#undef KF_SIMT_MIN_MAX_PAIRS
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

// Up to 32 bits; a larger shift counts as 32.
constexpr unsigned __funnelshift_lc(unsigned lo, unsigned hi, unsigned shift) {
  return shift >= 32 ? lo : __funnelshift_l(lo, hi, shift);
}
constexpr unsigned __funnelshift_rc(unsigned lo, unsigned hi, unsigned shift) {
  return shift >= 32 ? hi : __funnelshift_r(lo, hi, shift);
}
// Two 16-bit numbers times the low or the high two bytes.
constexpr int __dp2a_lo(int a, int b, int c) {
  return c + static_cast<short>(a) * static_cast<signed char>(b) + (a >> 16) * static_cast<signed char>(b >> 8);
}
constexpr int __dp2a_hi(int a, int b, int c) { return __dp2a_lo(a, b >> 16, c); }
constexpr unsigned __dp2a_lo(unsigned a, unsigned b, unsigned c) {
  return c + (a & 0xffff) * (b & 0xff) + (a >> 16) * (b >> 8 & 0xff);
}
constexpr unsigned __dp2a_hi(unsigned a, unsigned b, unsigned c) { return __dp2a_lo(a, b >> 16, c); }
constexpr int __rhadd(int a, int b) { return static_cast<int>((static_cast<long long>(a) + b + 1) >> 1); }
constexpr unsigned __uhadd(unsigned a, unsigned b) { return static_cast<unsigned>((std::uint64_t{a} + b) >> 1); }
constexpr unsigned __urhadd(unsigned a, unsigned b) { return static_cast<unsigned>((std::uint64_t{a} + b + 1) >> 1); }
// The place of the offset-th set bit, counted up from bit `base`, or down for a negative offset; ~0 if there is none.
constexpr unsigned __fns(unsigned mask, unsigned base, int offset) {
  if (offset == 0) return mask >> base & 1 ? base : ~0u;
  const int step = offset > 0 ? 1 : -1;
  for (int at = static_cast<int>(base); at >= 0 && at < 32; at += step) {
    if (mask >> at & 1 && (offset -= step) == 0) return static_cast<unsigned>(at);
  }
  return ~0u;
}

}  // namespace kf::simt
