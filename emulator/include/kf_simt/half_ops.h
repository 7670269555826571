// What float16 and bfloat16 have in common. KF_SIMT_HALF_TYPE(T, T2) defines their arithmetic, comparison and
// mathematical functions; KF_SIMT_HALF1_OPERATORS and KF_SIMT_HALF2_OPERATORS the operators. A sum, product or quotient
// of two halves is exact enough in float that rounding it again is right.
#pragma once

#include "kf_simt/atomics.h"
#include "kf_simt/half_bits.h"

// The members of T, with its conversions of bits: to and from_float are functions for float, from_double for double.
#define KF_SIMT_HALF_MEMBERS(T, to, from, from_exact)                 \
  std::uint16_t bits;                                                 \
  static T from_bits(std::uint16_t bits) {                            \
    T h;                                                              \
    h.bits = bits;                                                    \
    return h;                                                         \
  }                                                                   \
  static std::uint16_t to_bits(T h) { return h.bits; }                \
  static T from_float(float x) { return from_bits(from(x)); }         \
  static T from_double(double x) { return from_bits(from_exact(x)); } \
  static float to_float(T h) { return to(h.bits); }                   \
  template <class Int>                                                \
  static T from_integer(Int x) {                                      \
    return from_double(integer_to_odd(x));                            \
  }                                                                   \
  T() = default;                                                      \
  T(const T##_raw& raw) : bits(raw.x) {}                              \
  operator T##_raw() const { return {bits}; }
#define KF_SIMT_HALF_CONVERSIONS(T)               \
  T(float x) : T(from_float(x)) {}                \
  T(double x) : T(from_double(x)) {}              \
  T(short x) : T(from_integer(x)) {}              \
  T(unsigned short x) : T(from_integer(x)) {}     \
  T(int x) : T(from_integer(x)) {}                \
  T(unsigned x) : T(from_integer(x)) {}           \
  T(long x) : T(from_integer(x)) {}               \
  T(unsigned long x) : T(from_integer(x)) {}      \
  T(long long x) : T(from_integer(x)) {}          \
  T(unsigned long long x) : T(from_integer(x)) {} \
  operator float() const { return to_float(*this); }

#define KF_SIMT_HALF_UNARY(T, T2, name, expression) \
  inline T h##name(T a) {                           \
    const float x = T::to_float(a);                 \
    return T::from_float(expression);               \
  }                                                 \
  inline T2 h2##name(T2 a) { return {h##name(a.x), h##name(a.y)}; }

#define KF_SIMT_HALF_BINARY(T, T2, name, expression)    \
  inline T __h##name(T a, T b) {                        \
    const float x = T::to_float(a), y = T::to_float(b); \
    return T::from_float(expression);                   \
  }                                                     \
  inline T2 __h##name##2(T2 a, T2 b) { return {__h##name(a.x, b.x), __h##name(a.y, b.y)}; }

#define KF_SIMT_HALF_EXACT(T, T2, name)                                    \
  inline T __h##name##_rn(T a, T b) { return __h##name(a, b); }            \
  inline T2 __h##name##2_rn(T2 a, T2 b) { return __h##name##2(a, b); }     \
  inline T __h##name##_sat(T a, T b) { return saturate(__h##name(a, b)); } \
  inline T2 __h##name##2_sat(T2 a, T2 b) { return {__h##name##_sat(a.x, b.x), __h##name##_sat(a.y, b.y)}; }

// Comparisons: the plain one is false with NaN, the `u` (unordered) one true.
#define KF_SIMT_HALF_COMPARE(T, T2, name, op)                                                         \
  inline bool __h##name(T a, T b) {                                                                   \
    const float x = T::to_float(a), y = T::to_float(b);                                               \
    return !std::isnan(x) && !std::isnan(y) && x op y;                                                \
  }                                                                                                   \
  inline bool __h##name##u(T a, T b) {                                                                \
    const float x = T::to_float(a), y = T::to_float(b);                                               \
    return std::isnan(x) || std::isnan(y) || x op y;                                                  \
  }                                                                                                   \
  inline T2 __h##name##2(T2 a, T2 b) {                                                                \
    return {T::from_float(__h##name(a.x, b.x)), T::from_float(__h##name(a.y, b.y))};                  \
  }                                                                                                   \
  inline bool __hb##name##2(T2 a, T2 b) { return __h##name(a.x, b.x) && __h##name(a.y, b.y); }        \
  inline bool __hb##name##u2(T2 a, T2 b) { return __h##name##u(a.x, b.x) && __h##name##u(a.y, b.y); } \
  inline unsigned __h##name##2_mask(T2 a, T2 b) {                                                     \
    return (__h##name(a.x, b.x) ? 0xffffu : 0u) | (__h##name(a.y, b.y) ? 0xffff0000u : 0u);           \
  }

#define KF_SIMT_HALF_TYPE(T, T2)                                                                                \
  static_assert(sizeof(T) == 2 && sizeof(T2) == 4 && std::is_trivially_default_constructible_v<T2>, "");        \
  inline T saturate(T a) { return T::from_float(__saturatef(T::to_float(a))); }                                 \
  KF_SIMT_HALF_BINARY(T, T2, add, x + y)                                                                        \
  KF_SIMT_HALF_BINARY(T, T2, sub, x - y)                                                                        \
  KF_SIMT_HALF_BINARY(T, T2, mul, x* y)                                                                         \
  KF_SIMT_HALF_EXACT(T, T2, add)                                                                                \
  KF_SIMT_HALF_EXACT(T, T2, sub)                                                                                \
  KF_SIMT_HALF_EXACT(T, T2, mul)                                                                                \
  inline T __hdiv(T a, T b) { return T::from_float(T::to_float(a) / T::to_float(b)); }                          \
  inline T2 __h2div(T2 a, T2 b) { return {__hdiv(a.x, b.x), __hdiv(a.y, b.y)}; }                                \
  KF_SIMT_HALF_BINARY(T, T2, min, fminf(x, y))                                                                  \
  KF_SIMT_HALF_BINARY(T, T2, max, fmaxf(x, y))                                                                  \
  inline bool __hisnan(T a) { return std::isnan(T::to_float(a)); }                                              \
  inline int __hisinf(T a) {                                                                                    \
    const float x = T::to_float(a);                                                                             \
    return std::isinf(x) ? (x > 0 ? 1 : -1) : 0;                                                                \
  }                                                                                                             \
  inline T __hmin_nan(T a, T b) { return __hisnan(a) ? a : __hisnan(b) ? b : __hmin(a, b); }                    \
  inline T __hmax_nan(T a, T b) { return __hisnan(a) ? a : __hisnan(b) ? b : __hmax(a, b); }                    \
  inline T2 __hmin2_nan(T2 a, T2 b) { return {__hmin_nan(a.x, b.x), __hmin_nan(a.y, b.y)}; }                    \
  inline T2 __hmax2_nan(T2 a, T2 b) { return {__hmax_nan(a.x, b.x), __hmax_nan(a.y, b.y)}; }                    \
  inline T __hneg(T a) { return T::from_bits(static_cast<std::uint16_t>(T::to_bits(a) ^ 0x8000)); }             \
  inline T __habs(T a) { return T::from_bits(static_cast<std::uint16_t>(T::to_bits(a) & 0x7fff)); }             \
  inline T2 __hneg2(T2 a) { return {__hneg(a.x), __hneg(a.y)}; }                                                \
  inline T2 __habs2(T2 a) { return {__habs(a.x), __habs(a.y)}; }                                                \
  inline T2 __hisnan2(T2 a) { return {T::from_float(__hisnan(a.x)), T::from_float(__hisnan(a.y))}; }            \
  inline T __hfma(T a, T b, T c) {                                                                              \
    return T::from_double(fma_to_odd(T::to_float(a), T::to_float(b), T::to_float(c)));                          \
  }                                                                                                             \
  inline T __hfma_sat(T a, T b, T c) { return saturate(__hfma(a, b, c)); }                                      \
  inline T __hfma_relu(T a, T b, T c) {                                                                         \
    const T r = __hfma(a, b, c);                                                                                \
    return __hisnan(r) ? r : __hmax(r, T::from_float(0.0f));                                                    \
  }                                                                                                             \
  inline T2 __hfma2(T2 a, T2 b, T2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }                \
  inline T2 __hfma2_sat(T2 a, T2 b, T2 c) { return {__hfma_sat(a.x, b.x, c.x), __hfma_sat(a.y, b.y, c.y)}; }    \
  inline T2 __hfma2_relu(T2 a, T2 b, T2 c) { return {__hfma_relu(a.x, b.x, c.x), __hfma_relu(a.y, b.y, c.y)}; } \
  KF_SIMT_HALF_COMPARE(T, T2, eq, ==)                                                                           \
  KF_SIMT_HALF_COMPARE(T, T2, ne, !=)                                                                           \
  KF_SIMT_HALF_COMPARE(T, T2, lt, <)                                                                            \
  KF_SIMT_HALF_COMPARE(T, T2, le, <=)                                                                           \
  KF_SIMT_HALF_COMPARE(T, T2, gt, >)                                                                            \
  KF_SIMT_HALF_COMPARE(T, T2, ge, >=)                                                                           \
  KF_SIMT_HALF_UNARY(T, T2, exp, expf(x))                                                                       \
  KF_SIMT_HALF_UNARY(T, T2, exp2, exp2f(x))                                                                     \
  KF_SIMT_HALF_UNARY(T, T2, exp10, fast_exp10f(x))                                                              \
  KF_SIMT_HALF_UNARY(T, T2, log, logf(x))                                                                       \
  KF_SIMT_HALF_UNARY(T, T2, log2, log2f(x))                                                                     \
  KF_SIMT_HALF_UNARY(T, T2, log10, log10f(x))                                                                   \
  KF_SIMT_HALF_UNARY(T, T2, sqrt, sqrtf(x))                                                                     \
  KF_SIMT_HALF_UNARY(T, T2, rsqrt, rsqrtf(x))                                                                   \
  KF_SIMT_HALF_UNARY(T, T2, rcp, 1.0f / x)                                                                      \
  KF_SIMT_HALF_UNARY(T, T2, sin, sinf(x))                                                                       \
  KF_SIMT_HALF_UNARY(T, T2, cos, cosf(x))                                                                       \
  KF_SIMT_HALF_UNARY(T, T2, tanh, tanhf(x))                                                                     \
  KF_SIMT_HALF_UNARY(T, T2, ceil, ceilf(x))                                                                     \
  KF_SIMT_HALF_UNARY(T, T2, floor, floorf(x))                                                                   \
  KF_SIMT_HALF_UNARY(T, T2, trunc, truncf(x))                                                                   \
  KF_SIMT_HALF_UNARY(T, T2, rint, nearbyintf(x))                                                                \
  inline float __low2float(T2 a) { return T::to_float(a.x); }                                                   \
  inline float __high2float(T2 a) { return T::to_float(a.y); }                                                  \
  inline T2 __lowhigh2highlow(T2 a) { return {a.y, a.x}; }                                                      \
  KF_SIMT_HALF_UNARY(T, T2, tanh_approx, tanhf(x))                                                              \
  inline T2 __hcmadd(T2 a, T2 b, T2 c) {                                                                        \
    return {__hfma(__hneg(a.y), b.y, __hfma(a.x, b.x, c.x)), __hfma(a.y, b.x, __hfma(a.x, b.y, c.y))};          \
  }                                                                                                             \
  inline T atomicAdd(T* address, T value) {                                                                     \
    return atomic_update<std::uint16_t>(address, [value](T old) { return __hadd(old, value); });                \
  }                                                                                                             \
  inline T2 atomicAdd(T2* address, T2 value) {                                                                  \
    return atomic_update<std::uint32_t>(address, [value](T2 old) { return __hadd2(old, value); });              \
  }

#define KF_SIMT_HALF_OPERATORS(T, add, sub, mul, div, neg, lt, le, gt, ge, eq, ne) \
  inline T operator+(const T& a, const T& b) { return add(a, b); }                 \
  inline T operator-(const T& a, const T& b) { return sub(a, b); }                 \
  inline T operator*(const T& a, const T& b) { return mul(a, b); }                 \
  inline T operator/(const T& a, const T& b) { return div(a, b); }                 \
  inline T& operator+=(T& a, const T& b) { return a = add(a, b); }                 \
  inline T& operator-=(T& a, const T& b) { return a = sub(a, b); }                 \
  inline T& operator*=(T& a, const T& b) { return a = mul(a, b); }                 \
  inline T& operator/=(T& a, const T& b) { return a = div(a, b); }                 \
  inline T operator+(const T& a) { return a; }                                     \
  inline T operator-(const T& a) { return neg(a); }                                \
  inline bool operator<(const T& a, const T& b) { return lt(a, b); }               \
  inline bool operator<=(const T& a, const T& b) { return le(a, b); }              \
  inline bool operator>(const T& a, const T& b) { return gt(a, b); }               \
  inline bool operator>=(const T& a, const T& b) { return ge(a, b); }              \
  inline bool operator==(const T& a, const T& b) { return eq(a, b); }              \
  inline bool operator!=(const T& a, const T& b) { return ne(a, b); }

#define KF_SIMT_HALF1_OPERATORS(T)                                                                             \
  KF_SIMT_HALF_OPERATORS(T, __hadd, __hsub, __hmul, __hdiv, __hneg, __hlt, __hle, __hgt, __hge, __heq, __hneu) \
  inline T& operator++(T& a) { return a = __hadd(a, T::from_float(1)); }                                       \
  inline T& operator--(T& a) { return a = __hsub(a, T::from_float(1)); }                                       \
  inline T operator++(T& a, int) {                                                                             \
    const T before = a;                                                                                        \
    ++a;                                                                                                       \
    return before;                                                                                             \
  }                                                                                                            \
  inline T operator--(T& a, int) {                                                                             \
    const T before = a;                                                                                        \
    --a;                                                                                                       \
    return before;                                                                                             \
  }
#define KF_SIMT_HALF2_OPERATORS(T2)                                                                                    \
  KF_SIMT_HALF_OPERATORS(T2, __hadd2, __hsub2, __hmul2, __h2div, __hneg2, __hblt2, __hble2, __hbgt2, __hbge2, __hbeq2, \
                         __hbneu2)

// The conversions to and from integers: KF_SIMT_HALF_INTEGER(T, half, int, int) defines __half2int_rn, __int2half_rn…
#define KF_SIMT_HALF_INTEGER(T, name, to, To)                                                                 \
  inline To __##name##2##to##_rn(T a) { return saturating_cast<To>(std::nearbyint(double{T::to_float(a)})); } \
  inline To __##name##2##to##_rz(T a) { return saturating_cast<To>(double{T::to_float(a)}); }                 \
  inline To __##name##2##to##_ru(T a) { return saturating_cast<To>(std::ceil(double{T::to_float(a)})); }      \
  inline To __##name##2##to##_rd(T a) { return saturating_cast<To>(std::floor(double{T::to_float(a)})); }     \
  inline T __##to##2##name##_rn(To a) { return T::from_integer(a); }
#define KF_SIMT_HALF_INTEGERS(T, name)                  \
  KF_SIMT_HALF_INTEGER(T, name, short, short)           \
  KF_SIMT_HALF_INTEGER(T, name, ushort, unsigned short) \
  KF_SIMT_HALF_INTEGER(T, name, int, int)               \
  KF_SIMT_HALF_INTEGER(T, name, uint, unsigned)         \
  KF_SIMT_HALF_INTEGER(T, name, ll, long long)          \
  KF_SIMT_HALF_INTEGER(T, name, ull, unsigned long long)

// What a cast to an integer is. Unlike that of a float it saturates in the integer's own width.
template <class To, class T>
auto half_to_integer(T x) {
  if constexpr (std::is_integral_v<To> && !std::is_same_v<To, bool>) {
    return saturating_cast<To>(double{T::to_float(x)});
  } else {
    return x;
  }
}

// From float in a direction: KF_SIMT_HALF_ROUNDED(T, half, float_to_half, half_to_float, rz, kZero) is __float2half_rz.
#define KF_SIMT_HALF_ROUNDED(T, name, to, back, r, direction)                                               \
  inline T __float2##name##_##r(float x) {                                                                  \
    return T::from_bits(rounded_bits(to(x), double{back(to(x))}, double{x}, RoundingDirection::direction)); \
  }
#define KF_SIMT_HALF_ROUNDINGS(T, name, to, back)                                                             \
  KF_SIMT_HALF_ROUNDED(T, name, to, back, rz, kZero)                                                          \
  KF_SIMT_HALF_ROUNDED(T, name, to, back, ru, kUp)                                                            \
  KF_SIMT_HALF_ROUNDED(T, name, to, back, rd, kDown)                                                          \
  inline signed char __##name##2char_rz(T a) { return saturating_cast<signed char>(double{T::to_float(a)}); } \
  inline unsigned char __##name##2uchar_rz(T a) { return saturating_cast<unsigned char>(double{T::to_float(a)}); }

// Conversions and names that differ in the type's name alone: KF_SIMT_HALF_NAMES(__half, __half2, half).
#define KF_SIMT_HALF_NAMES(T, T2, name)                                                              \
  inline float __##name##2float(T a) { return T::to_float(a); }                                      \
  inline T __float2##name(float x) { return T::from_float(x); }                                      \
  inline T __float2##name##_rn(float x) { return T::from_float(x); }                                 \
  inline T __double2##name(double x) { return T::from_double(x); }                                   \
  inline T2 __float2##name##2_rn(float x) { return {T::from_float(x), T::from_float(x)}; }           \
  inline T2 __floats2##name##2_rn(float x, float y) { return {T::from_float(x), T::from_float(y)}; } \
  inline T2 __float22##name##2_rn(float2 v) { return {T::from_float(v.x), T::from_float(v.y)}; }     \
  inline float2 __##name##22float2(T2 v) { return {T::to_float(v.x), T::to_float(v.y)}; }            \
  inline T2 __##name##2##name##2(T a) { return {a, a}; }                                             \
  inline T2 make_##name##2(T x, T y) { return {x, y}; }                                              \
  inline short __##name##_as_short(T a) { return static_cast<short>(a.bits); }                       \
  inline T __low2##name(T2 a) { return a.x; }                                                        \
  inline T __high2##name(T2 a) { return a.y; }                                                       \
  inline T2 __low2##name##2(T2 a) { return {a.x, a.x}; }                                             \
  inline T2 __high2##name##2(T2 a) { return {a.y, a.y}; }                                            \
  inline T2 __lows2##name##2(T2 a, T2 b) { return {a.x, b.x}; }                                      \
  inline T2 __highs2##name##2(T2 a, T2 b) { return {a.y, b.y}; }                                     \
  inline T2 __halves2##name##2(T a, T b) { return {a, b}; }                                          \
  inline unsigned short __##name##_as_ushort(T a) { return a.bits; }                                 \
  inline T __short_as_##name(short bits) { return T::from_bits(static_cast<std::uint16_t>(bits)); }  \
  inline T __ushort_as_##name(unsigned short bits) { return T::from_bits(bits); }                    \
  template <class To> /* what the rewriter puts into a cast */                                       \
  auto kf_integer(T x) {                                                                             \
    return half_to_integer<To>(x);                                                                   \
  }
