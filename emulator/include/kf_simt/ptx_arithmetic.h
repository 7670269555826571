// What the instructions of inline PTX that compute become: arithmetic in every type, bits, conversions.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kf_simt/half_bits.h"
#include "kf_simt/math.h"
#include "kf_simt/ptx_registers.h"

namespace kf::simt::ptx {

// ---- float16, bfloat16, float8 ----

struct F16 {
  static float to_float(std::uint16_t bits) { return half_to_float(bits); }
  static std::uint16_t from_float(float x) { return float_to_half(x); }
  static std::uint16_t from_double(double x) { return double_to_half(x); }
};
struct BF16 {
  static float to_float(std::uint16_t bits) { return bfloat16_to_float(bits); }
  static std::uint16_t from_float(float x) { return float_to_bfloat16(x); }
  static std::uint16_t from_double(double x) { return double_to_bfloat16(x); }
};

// A float of 8 bits with kExponent bits of exponent and kMantissa of mantissa. E4M3 has no infinity, and one NaN.
template <int kExponent, int kMantissa, bool kHasInfinity>
struct Float8 {
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr unsigned kNan = 0x7f;
  static constexpr unsigned kLargest = kHasInfinity ? 0x7b : 0x7e;

  static float to_float(std::uint8_t bits) {
    const unsigned rest = bits & 0x7fu;
    const int exponent = static_cast<int>(rest >> kMantissa);
    const auto mantissa = static_cast<float>(rest & ((1u << kMantissa) - 1));
    float value;
    if (rest > kLargest) {
      value = kHasInfinity && rest == 0x7c ? HUGE_VALF : std::numeric_limits<float>::quiet_NaN();
    } else if (exponent == 0) {
      value = std::ldexp(mantissa, 1 - kBias - kMantissa);
    } else {
      value = std::ldexp(mantissa + static_cast<float>(1 << kMantissa), exponent - kBias - kMantissa);
    }
    return bits & 0x80 ? -value : value;
  }
  // To the nearest, ties to even; what is too large becomes the largest (.satfinite).
  static std::uint8_t from_float(float x) {
    if (std::isnan(x)) return kNan;
    const unsigned sign = std::signbit(x) ? 0x80 : 0;
    const float magnitude = std::fabs(x);
    unsigned low = 0, high = kLargest;  // the greatest value that is not greater than the magnitude
    while (low < high) {
      const unsigned middle = (low + high + 1) / 2;
      if (to_float(static_cast<std::uint8_t>(middle)) <= magnitude) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    if (low < kLargest) {
      const float below = magnitude - to_float(static_cast<std::uint8_t>(low));
      const float above = to_float(static_cast<std::uint8_t>(low + 1)) - magnitude;
      if (above < below || (above == below && (low & 1) != 0)) ++low;
    }
    return static_cast<std::uint8_t>(sign | low);
  }
};
using E4M3 = Float8<4, 3, false>;
using E5M2 = Float8<5, 2, true>;

template <class H, int N, class Operation, class... Bits>
auto half_op(Operation operation, Bits... bits) {
  if constexpr (N == 1) {
    return H::from_double(operation.halves(double{H::to_float(bits)}...));
  } else {
    const auto low = H::from_double(operation.halves(double{H::to_float(static_cast<std::uint16_t>(bits))}...));
    const auto high = H::from_double(operation.halves(double{H::to_float(static_cast<std::uint16_t>(bits >> 16))}...));
    return static_cast<std::uint32_t>(low | static_cast<std::uint32_t>(high) << 16);
  }
}

// ---- arithmetic ----

// A subnormal float becomes zero (.ftz).
inline float flush(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

// Integers wrap around: they are computed as unsigned ones of at least 32 bits.
template <class T>
using Wide = std::make_unsigned_t<std::conditional_t<(sizeof(T) < 4), int, T>>;

// In double a sum, difference, product, quotient or root of halves is exact enough to be rounded once more.
#define KF_SIMT_PTX_ARITHMETIC(name, op)                                                                 \
  struct name {                                                                                          \
    template <class T>                                                                                   \
    T operator()(T a, T b) const {                                                                       \
      if constexpr (std::is_floating_point_v<T>) {                                                       \
        return a op b;                                                                                   \
      } else {                                                                                           \
        return static_cast<T>(static_cast<Wide<T>>(static_cast<Wide<T>>(a) op static_cast<Wide<T>>(b))); \
      }                                                                                                  \
    }                                                                                                    \
    static double halves(double a, double b) { return a op b; }                                          \
  };
KF_SIMT_PTX_ARITHMETIC(Add, +)
KF_SIMT_PTX_ARITHMETIC(Sub, -)
KF_SIMT_PTX_ARITHMETIC(Mul, *)
#undef KF_SIMT_PTX_ARITHMETIC

struct Fma {
  float operator()(float a, float b, float c) const { return std::fmaf(a, b, c); }
  double operator()(double a, double b, double c) const { return std::fma(a, b, c); }
  static double halves(double a, double b, double c) {
    return fma_to_odd(static_cast<float>(a), static_cast<float>(b), static_cast<float>(c));
  }
};
struct FmaRelu {
  static double halves(double a, double b, double c) {
    const double sum = Fma::halves(a, b, c);
    return sum < 0 ? 0 : sum;
  }
};
// A division by zero, or of the smallest integer by -1, gives what hardware gives: all bits set, and the same number.
struct Div {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) {
      if (b == 0) return static_cast<T>(~T{0});
      if (std::is_signed_v<T> && b == static_cast<T>(-1)) return static_cast<T>(Wide<T>{0} - static_cast<Wide<T>>(a));
    }
    return static_cast<T>(a / b);
  }
};
struct Rem {
  template <class T>
  T operator()(T a, T b) const {
    if (b == 0) return a;
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
    return static_cast<T>(a % b);
  }
};
// Of a NaN and a number the number; with .NaN the NaN.
#define KF_SIMT_PTX_CHOICE(name, function, op)                          \
  struct name {                                                         \
    template <class T>                                                  \
    T operator()(T a, T b) const {                                      \
      if constexpr (std::is_floating_point_v<T>) return function(a, b); \
      return a op b ? a : b;                                            \
    }                                                                   \
    static double halves(double a, double b) { return function(a, b); } \
  };
KF_SIMT_PTX_CHOICE(Min, std::fmin, <)
KF_SIMT_PTX_CHOICE(Max, std::fmax, >)
#undef KF_SIMT_PTX_CHOICE
template <class Operation>
struct OrNan {
  template <class T>
  T operator()(T a, T b) const {
    return std::isnan(a) || std::isnan(b) ? std::numeric_limits<T>::quiet_NaN() : Operation()(a, b);
  }
};
using MinNan = OrNan<Min>;
using MaxNan = OrNan<Max>;
template <class Operation>
struct Saturated {
  std::int32_t operator()(std::int32_t a, std::int32_t b) const {
    const std::int64_t exact = Operation()(std::int64_t{a}, std::int64_t{b});
    return static_cast<std::int32_t>(exact > INT32_MAX ? INT32_MAX : exact < INT32_MIN ? INT32_MIN : exact);
  }
};
using AddSaturated = Saturated<Add>;
using SubSaturated = Saturated<Sub>;
struct Neg {
  template <class T>
  T operator()(T a) const {
    if constexpr (std::is_floating_point_v<T>) return -a;
    return static_cast<T>(Wide<T>{0} - static_cast<Wide<T>>(a));
  }
  static double halves(double a) { return -a; }
};
struct Abs {
  template <class T>
  T operator()(T a) const {
    if constexpr (std::is_floating_point_v<T>) return std::fabs(a);
    return a < 0 ? Neg()(a) : a;
  }
  static double halves(double a) { return std::fabs(a); }
};

// Hardware's approximations are here as exact as the C library's functions.
#define KF_SIMT_PTX_FUNCTION(name, expression)                                \
  struct name {                                                               \
    template <class T>                                                        \
    T operator()(T x) const {                                                 \
      return static_cast<T>(expression);                                      \
    }                                                                         \
    static double halves(double x) { return static_cast<float>(expression); } \
  };
KF_SIMT_PTX_FUNCTION(Rcp, 1 / x)
KF_SIMT_PTX_FUNCTION(Sqrt, std::sqrt(x))
KF_SIMT_PTX_FUNCTION(Rsqrt, 1.0 / std::sqrt(static_cast<double>(x)))
KF_SIMT_PTX_FUNCTION(Exp2, std::exp2(x))
KF_SIMT_PTX_FUNCTION(Log2, std::log2(x))
KF_SIMT_PTX_FUNCTION(Sin, std::sin(x))
KF_SIMT_PTX_FUNCTION(Cos, std::cos(x))
KF_SIMT_PTX_FUNCTION(Tanh, std::tanh(x))
#undef KF_SIMT_PTX_FUNCTION

template <class T>
T mul_hi(T a, T b) {
  if constexpr (sizeof(T) == 8) {
    using Product = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    return static_cast<T>(static_cast<Product>(a) * b >> 64);
  } else {
    using Product = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
    return static_cast<T>(Product{a} * b >> (8 * sizeof(T)));
  }
}
template <class T>
auto mul_wide(T a, T b) {
  using Signed = std::conditional_t<sizeof(T) == 2, std::int32_t, std::int64_t>;
  using Product = std::conditional_t<std::is_signed_v<T>, Signed, std::make_unsigned_t<Signed>>;
  return static_cast<Product>(static_cast<Product>(a) * static_cast<Product>(b));
}
template <class T>
T shift_left(T a, unsigned by) {
  return by >= 8 * sizeof(T) ? T{0} : static_cast<T>(static_cast<Wide<T>>(a) << by);
}
template <class T>
T shift_right(T a, unsigned by) {
  if (by >= 8 * sizeof(T)) return a < 0 ? static_cast<T>(-1) : T{0};
  return static_cast<T>(a >> by);
}
inline std::uint32_t leading_zeros(std::uint32_t a) { return a == 0 ? 32 : static_cast<unsigned>(__builtin_clz(a)); }
inline std::uint32_t leading_zeros(std::uint64_t a) { return a == 0 ? 64 : static_cast<unsigned>(__builtin_clzll(a)); }
// The place of the first bit that differs from the sign, or what it must be shifted by to come to the top; ~0 if none.
template <class T>
std::uint32_t find_leading(T a, bool amount) {
  using Unsigned = std::make_unsigned_t<T>;
  const auto bits = static_cast<Unsigned>(a < 0 ? ~a : a);
  if (bits == 0) return ~0u;
  const std::uint32_t zeros = leading_zeros(bits);
  return amount ? zeros : static_cast<std::uint32_t>(8 * sizeof(T)) - 1 - zeros;
}
// bfe: `length` bits from `from` on, with the sign of the field for signed types.
template <class T>
T extract_field(T a, unsigned from, unsigned length) {
  constexpr unsigned kBits = 8 * sizeof(T);
  using Unsigned = std::make_unsigned_t<T>;
  from &= 0xff;
  length &= 0xff;
  const unsigned top = from + length - 1 < kBits - 1 ? from + length - 1 : kBits - 1;
  const bool sign = std::is_signed_v<T> && length != 0 && (static_cast<Unsigned>(a) >> top & 1) != 0;
  Unsigned result = 0;
  for (unsigned i = 0; i < kBits; ++i) {
    const bool bit = i < length && from + i < kBits ? (static_cast<Unsigned>(a) >> (from + i) & 1) != 0 : sign;
    result |= static_cast<Unsigned>(bit) << i;
  }
  return static_cast<T>(result);
}
// bfi: the low `length` bits of a take the place of those of b from `to` on.
template <class T>
T insert_field(T a, T b, unsigned to, unsigned length) {
  to &= 0xff;
  length &= 0xff;
  for (unsigned i = 0; i < length && to + i < 8 * sizeof(T); ++i) {
    const T bit = T{1} << (to + i);
    b = (a >> i & 1) != 0 ? b | bit : b & ~bit;
  }
  return b;
}
// Bit a, b, c of each place choose one of the eight bits of `table`.
inline std::uint32_t logic3(std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t table) {
  std::uint32_t result = 0;
  for (unsigned i = 0; i < 8; ++i) {
    if (table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  }
  return result;
}
template <class A, class B, class C>
C dot4(std::uint32_t a, std::uint32_t b, C c) {
  using Byte = std::conditional_t<std::is_signed_v<A>, std::int8_t, std::uint8_t>;
  using OtherByte = std::conditional_t<std::is_signed_v<B>, std::int8_t, std::uint8_t>;
  auto sum = static_cast<std::uint32_t>(c);
  for (int i = 0; i < 4; ++i) {
    sum += static_cast<std::uint32_t>(static_cast<Byte>(a >> 8 * i) * static_cast<OtherByte>(b >> 8 * i));
  }
  return static_cast<C>(sum);
}

template <class T>
bool compare_floats(T a, T b, bool result, bool unordered) {
  return std::isnan(a) || std::isnan(b) ? unordered : result;
}

// ---- conversions ----

enum class Way { kNear, kZero, kDown, kUp };
inline double to_whole(double x, Way way) {
  switch (way) {
    case Way::kZero: return std::trunc(x);
    case Way::kDown: return std::floor(x);
    case Way::kUp: return std::ceil(x);
    default: return std::nearbyint(x);
  }
}

template <class T>
constexpr bool kIsHalf = std::is_same_v<T, F16> || std::is_same_v<T, BF16>;

template <class H>
std::uint16_t truncated_half(float x) {
  const std::uint16_t nearest = H::from_float(x);
  return rounded_bits(nearest, H::to_float(nearest), x, RoundingDirection::kZero);
}

// To and From are F16, BF16 or C++ types. `whole`: round to an integer, whatever the type. A float becomes an integer
// with saturation, as on a GPU, and NaN becomes 0.
template <class To, class From, class Value>
auto convert(Value value, Way way, bool whole) {
  if constexpr (std::is_integral_v<To> && std::is_integral_v<From>) {
    return static_cast<To>(value);
  } else if constexpr (std::is_integral_v<From>) {
    const double exact = integer_to_odd(value);
    if constexpr (kIsHalf<To>) {
      return To::from_double(exact);
    } else {
      return static_cast<To>(value);
    }
  } else {
    double x;
    if constexpr (kIsHalf<From>) {
      x = From::to_float(value);
    } else {
      x = value;
    }
    if constexpr (std::is_integral_v<To>) {
      return saturating_cast<To>(to_whole(x, way), std::is_same_v<From, double>);
    } else {
      if (whole) x = to_whole(x, way);
      if constexpr (kIsHalf<To>) {
        return way == Way::kZero && !whole ? truncated_half<To>(__double2float_rz(x)) : To::from_double(x);
      } else if constexpr (std::is_same_v<To, float>) {
        return way == Way::kZero && !whole ? __double2float_rz(x) : static_cast<float>(x);
      } else {
        return x;
      }
    }
  }
}
template <class To, class From>
To saturated(From x) {
  if constexpr (std::is_signed_v<From>) {
    if (x < 0 &&
        (!std::is_signed_v<To> || static_cast<std::int64_t>(x) < std::int64_t{std::numeric_limits<To>::min()})) {
      return std::numeric_limits<To>::min();
    }
    if (x < 0) return static_cast<To>(x);
  }
  constexpr auto kLargest = static_cast<std::uint64_t>(std::numeric_limits<To>::max());
  return static_cast<std::uint64_t>(x) > kLargest ? std::numeric_limits<To>::max() : static_cast<To>(x);
}

// The first operand becomes the upper half.
template <class H>
std::uint32_t pack_halves(float high, float low, bool to_zero, bool relu) {
  const auto one = [&](float x) {
    if (relu && x < 0) x = 0;
    return static_cast<std::uint32_t>(to_zero ? truncated_half<H>(x) : H::from_float(x));
  };
  return one(high) << 16 | one(low);
}
template <class B>
std::uint16_t pack_bytes(float high, float low) {
  return static_cast<std::uint16_t>(B::from_float(high) << 8 | B::from_float(low));
}
template <class B>
std::uint32_t unpack_bytes(std::uint16_t bytes) {
  const auto one = [](int byte) {
    return static_cast<std::uint32_t>(F16::from_float(B::to_float(static_cast<std::uint8_t>(byte))));
  };
  return one(bytes >> 8) << 16 | one(bytes & 0xff);
}

// TF32: a float whose last 13 bits are zero. rna rounds ties away from zero.
inline std::uint32_t to_tf32_rna(float x) {
  const std::uint32_t bits = __float_as_uint(x);
  return std::isfinite(x) ? (bits + 0x1000u) & ~0x1fffu : bits;
}
inline std::uint32_t to_tf32_rn(float x) {
  const std::uint32_t bits = __float_as_uint(x);
  return std::isfinite(x) ? (bits + 0xfffu + (bits >> 13 & 1)) & ~0x1fffu : bits;
}
inline std::uint32_t to_tf32_rz(float x) { return __float_as_uint(x) & (std::isfinite(x) ? ~0x1fffu : ~0u); }

}  // namespace kf::simt::ptx
