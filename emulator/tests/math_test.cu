// The functions that kernels use.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <climits>
#include <cmath>

#include "memory.h"

namespace {

using test::Memory;

template <class T>
struct Result {
  T got = 0;
  double expected = NAN;
};

__global__ void functions(float x, Result<float>* out) {
  const double d = x;
  *out++ = {expf(x), std::exp(d)};
  *out++ = {__expf(x), std::exp(d)};
  *out++ = {exp2f(x), std::exp2(d)};
  *out++ = {exp10f(x), std::pow(10, d)};
  *out++ = {logf(x), std::log(d)};
  *out++ = {__logf(x), std::log(d)};
  *out++ = {__log2f(x), std::log2(d)};
  *out++ = {log1pf(x), std::log1p(d)};
  *out++ = {expm1f(x), std::expm1(d)};
  *out++ = {sqrtf(x), std::sqrt(d)};
  *out++ = {rsqrtf(x), 1 / std::sqrt(d)};
  *out++ = {__frsqrt_rn(x), 1 / std::sqrt(d)};
  *out++ = {__frcp_rn(x), 1 / d};
  *out++ = {__fdividef(x, 3.0f), d / 3};
  *out++ = {tanhf(x), std::tanh(d)};
  *out++ = {erff(x), std::erf(d)};
  *out++ = {erfcf(x), std::erfc(d)};
  *out++ = {powf(x, 2.5f), std::pow(d, 2.5)};
  *out++ = {__powf(x, 2.5f), std::pow(d, 2.5)};
  *out++ = {sinf(x), std::sin(d)};
  *out++ = {__cosf(x), std::cos(d)};
  *out++ = {fmaf(x, x, 1.0f), d * d + 1};
  *out++ = {__fmaf_rn(x, x, 1.0f), d * d + 1};
  *out++ = {fmaxf(x, NAN), d};
  *out++ = {fminf(x, 0.25f), 0.25};
  *out++ = {fabsf(-x), d};
  *out++ = {floorf(x) + ceilf(x) + truncf(-x) + rintf(2.5f), 1 + 2 - 1 + 2};
  *out++ = {fmodf(7.5f, 2.0f), 1.5};
  *out++ = {cbrtf(x), std::cbrt(d)};
  *out++ = {__saturatef(x) + __saturatef(-x), 1};
  *out++ = {normcdff(x), 0.5 * std::erfc(-d / std::sqrt(2.0))};
  float s, c;
  sincosf(x, &s, &c);
  *out++ = {s * s + c * c, 1};
  *out++ = {copysignf(x, -1.0f), -d};
  *out++ = {ldexpf(x, 3), 8 * d};
}

__global__ void double_functions(double x, Result<double>* out) {
  *out++ = {exp(x), std::exp(x)};
  *out++ = {rsqrt(x), 1 / std::sqrt(x)};
  *out++ = {fma(x, x, 1.0), x * x + 1};
  *out++ = {tanh(x) + erf(x), std::tanh(x) + std::erf(x)};
  *out++ = {max(x, 2.0) + min(x, 1.0f), 3};
  *out++ = {__dsqrt_rn(x) + __drcp_rn(x), std::sqrt(x) + 1 / x};
}

TEST(Math, Functions) {
  Memory<Result<float>> floats(34);
  functions<<<1, 1>>>(1.25f, floats.get());
  for (const auto& r : floats) EXPECT_NEAR(r.got, r.expected, 4e-7 * std::fabs(r.expected)) << &r - floats.get();
  Memory<Result<double>> doubles(6);
  double_functions<<<1, 1>>>(1.25, doubles.get());
  for (const auto& r : doubles) EXPECT_NEAR(r.got, r.expected, 1e-15 * std::fabs(r.expected)) << &r - doubles.get();
}

__global__ void predicates(int* ok) {
  const float infinity = INFINITY;
  int n = 0;
  n += isnan(infinity - infinity) && !isnan(1.0f);
  n += isinf(-infinity) && !isinf(0.0f);
  n += isfinite(1.0f) && !isfinite(infinity);
  n += max(3, 5) == 5 && min(-1, 2) == -1 && max(2u, 7u) == 7u && max(1.5f, 0.5f) == 1.5f;
  n += max(NAN, 1.0f) == 1.0f && min(1.0f, NAN) == 1.0f;
  n += min(5ll, 7ll) == 5 && max(size_t{3}, size_t{4}) == 4;
  n += abs(-3) == 3 && abs(-2.5f) == 2.5f;
  *ok = n;
}

TEST(Math, Predicates) {
  Memory<int> ok(1);
  predicates<<<1, 1>>>(ok.get());
  EXPECT_EQ(ok[0], 7);
}

__global__ void integers(int* ok) {
  int n = 0;
  n += __popc(0xf0f0u) == 8 && __popcll(~0ull) == 64;
  n += __clz(1) == 31 && __clz(0) == 32 && __clzll(1) == 63 && __clz(-1) == 0;
  n += __ffs(0) == 0 && __ffs(8) == 4 && __ffsll(1ll << 40) == 41;
  n += __brev(1u) == 0x80000000u && __brev(0x0000f00du) == 0xb00f0000u && __brevll(1ull) == 1ull << 63;
  n += __mulhi(1 << 30, -8) == -2 && __umulhi(0x80000000u, 6u) == 3u;
  n += __umul64hi(1ull << 63, 6ull) == 3ull && __mul64hi(-1, 1) == -1;
  n += __float_as_int(1.0f) == 0x3f800000 && __int_as_float(0x40000000) == 2.0f;
  n += __float_as_uint(-0.0f) == 0x80000000u && __uint_as_float(0x7f800000u) == INFINITY;
  n += __longlong_as_double(__double_as_longlong(1.5)) == 1.5 && __hiloint2double(0x3ff80000, 0) == 1.5;
  n += __float2int_rn(2.5f) == 2 && __float2int_rn(3.5f) == 4 && __float2int_rz(-2.9f) == -2;
  n += __float2int_ru(2.1f) == 3 && __float2int_rd(-2.1f) == -3;
  n += __float2int_rz(3e9f) == INT_MAX && __float2int_rz(-3e9f) == INT_MIN && __float2int_rz(NAN) == 0;
  n += __float2uint_rz(-1.0f) == 0u && __float2uint_rz(5e9f) == UINT_MAX;
  n += __double2int_rn(0.5) == 0 && __double2ll_rz(1e300) == LLONG_MAX;
  n += __int2float_rn(16777217) == 16777216.0f;
  n += __byte_perm(0x33221100u, 0x77665544u, 0x7160u) == 0x77116600u;
  n += __funnelshift_l(0x80000000u, 1u, 1) == 3u && __funnelshift_r(0u, 3u, 1) == 0x80000000u;
  n += __dp4a(0x01020304, 0x01010101, 5) == 15;
  n += __usad(3u, 10u, 1u) == 8u && __sad(-3, 4, 1u) == 8u;
  n += __mul24(-3, 5) == -15 && __hadd(3, 6) == 4;
  *ok = n;
}

TEST(Math, Integers) {
  Memory<int> ok(1);
  integers<<<1, 1>>>(ok.get());
  EXPECT_EQ(ok[0], 20);
}

// What an H200 makes of a number that has no place in an integer, or none in 32 bits.
struct Integers {
  int s8, u8, s16, u16, s32;
  unsigned u32;
  long long s64;
  unsigned long long u64;
};
template <class T>
__global__ void casts(const T* x, Integers* out) {
  const int i = threadIdx.x;
  out[i] = {(signed char)x[i], (unsigned char)x[i], (short)x[i],       static_cast<unsigned short>(x[i]),
            (int)x[i],         unsigned(x[i]),      (long long)(x[i]), static_cast<unsigned long long>(x[i])};
}
template <class T>
void expect_casts(T x, const Integers& expected) {
  Memory<T> in(1, x);
  Memory<Integers> out(1);
  casts<<<1, 1>>>(in.get(), out.get());
  const Integers& got = out[0];
  EXPECT_EQ(got.s8, expected.s8) << double(x);
  EXPECT_EQ(got.u8, expected.u8) << double(x);
  EXPECT_EQ(got.s16, expected.s16) << double(x);
  EXPECT_EQ(got.u16, expected.u16) << double(x);
  EXPECT_EQ(got.s32, expected.s32) << double(x);
  EXPECT_EQ(got.u32, expected.u32) << double(x);
  EXPECT_EQ(got.s64, expected.s64) << double(x);
  EXPECT_EQ(got.u64, expected.u64) << double(x);
}

TEST(Math, CastsOutOfRangeAreAGpus) {
  constexpr auto kLow = LLONG_MIN, kHigh = LLONG_MAX;
  const auto both = [](double x, const Integers& expected) {
    expect_casts(static_cast<float>(x), expected);
    expect_casts(x, expected);
  };
  both(1e10, {-1, 255, -1, 65535, INT_MAX, UINT_MAX, 10000000000, 10000000000u});
  both(-1e10, {0, 0, 0, 0, INT_MIN, 0, -10000000000, 0});
  both(300, {44, 44, 300, 300, 300, 300, 300, 300});
  both(-300, {-44, 0, -300, 0, -300, 0, -300, 0});
  both(-1.5, {-1, 0, -1, 0, -1, 0, -1, 0});
  both(-0.75, {0, 0, 0, 0, 0, 0, 0, 0});
  both(127.5, {127, 127, 127, 127, 127, 127, 127, 127});
  both(70000, {112, 112, 4464, 4464, 70000, 70000, 70000, 70000});
  both(-40000, {-64, 0, 25536, 0, -40000, 0, -40000, 0});
  both(3e9, {-1, 0, -1, 24064, INT_MAX, 3000000000u, 3000000000, 3000000000u});
  both(0x1p63, {-1, 255, -1, 65535, INT_MAX, UINT_MAX, kHigh, 0x8000000000000000u});
  both(0x1p64, {-1, 255, -1, 65535, INT_MAX, UINT_MAX, kHigh, ULLONG_MAX});
  both(-0x1p64, {0, 0, 0, 0, INT_MIN, 0, kLow, 0});
  both(INFINITY, {-1, 255, -1, 65535, INT_MAX, UINT_MAX, kHigh, ULLONG_MAX});
  both(-INFINITY, {0, 0, 0, 0, INT_MIN, 0, kLow, 0});
  expect_casts(NAN, {0, 0, 0, 0, 0, 0, kLow, 0x8000000000000000u});
  expect_casts(double{NAN}, {0, 0, 0, 0, INT_MIN, 0x80000000u, kLow, 0x8000000000000000u});
}

TEST(Math, CastsOfHalfTypesSaturateInTheIntegersWidth) {
  const auto both = [](float x, const Integers& expected) {
    expect_casts(__half(x), expected);
    expect_casts(__nv_bfloat16(x), expected);
  };
  both(300, {127, 255, 300, 300, 300, 300, 300, 300});
  both(-300, {-128, 0, -300, 0, -300, 0, -300, 0});
  both(128, {127, 128, 128, 128, 128, 128, 128, 128});
  both(-1.5f, {-1, 0, -1, 0, -1, 0, -1, 0});
  both(INFINITY, {127, 255, 32767, 65535, INT_MAX, UINT_MAX, LLONG_MAX, ULLONG_MAX});
  both(-INFINITY, {-128, 0, -32768, 0, INT_MIN, 0, LLONG_MIN, 0});
  both(NAN, {0, 0, 0, 0, 0, 0, LLONG_MIN, 0x8000000000000000u});
  expect_casts(__nv_bfloat16(1e10f), {127, 255, 32767, 65535, INT_MAX, UINT_MAX, 9999220736, 9999220736u});
}

// The forms that a cast can have, as far as the rewriter has to find their operands.
#define TO_INT(x) ((int)(x))
typedef unsigned char byte_t;
using number_t = long long;
struct Holder {
  float at[2];
  __device__ Holder(float x) : at{x, -x}, whole((int)x) {}
  __device__ float get(int i) const { return at[i]; }
  __host__ __device__ int floor_of() const { return (int)at[0]; }
  int whole;
};
template <class T>
__device__ T as(float x) {
  return (T)x;
}
__global__ void forms(const float* p, int* out) {
  const Holder h(p[0]);
  const Holder* const at = &h;
  int i = 0;
  out[i++] = (int)p[0];
  out[i++] = (int)*p;
  out[i++] = (int)-p[1];
  out[i++] = (int)h.at[0];
  out[i++] = (int)at->get(0);
  out[i++] = TO_INT(p[0] * 2);
  out[i++] = h.whole;
  out[i++] = h.floor_of();
  out[i++] = as<int>(p[0]);
  out[i++] = (int)(unsigned)p[1] + INT_MAX;
  out[i++] = int(p[0]) - 0;
  out[i++] = static_cast<int>(p[0] + 1.0f);
  out[i++] = [=](float x) { return (int)x; }(p[0]);
  out[i++] = (byte_t)p[1] + INT_MAX;
  out[i++] = (int)((number_t)p[2] == LLONG_MAX) * INT_MAX;
  out[i++] = (int)__fmaf_rn(p[0], 2.0f, 1.0f);
}

TEST(Math, CastsInAllForms) {
  Memory<float> in(3);
  in[0] = 1e10f;
  in[1] = -1e10f;
  in[2] = 1e30f;
  Memory<int> out(16);
  forms<<<1, 1>>>(in.get(), out.get());
  for (std::size_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i], INT_MAX) << i;
}

__host__ __device__ int truncated(float x) { return (int)x; }

TEST(Math, CastsOnTheHostAreTheHosts) {
  volatile float large = 1e10f;
  const int host = static_cast<int>(large);
  EXPECT_EQ(truncated(large), host);
}

__global__ void special(float x, float y, float* out) {
  int i = 0;
  out[i++] = __fdividef(x, y);
  out[i++] = __powf(x, y);
  out[i++] = __sinf(x);
  out[i++] = __cosf(x);
  out[i++] = __tanf(x);
  out[i++] = __fsqrt_rz(x);
  out[i++] = __fsqrt_ru(x);
  out[i++] = __fadd_rd(x, -x);
  out[i++] = __fmaf_rd(x, 1.0f, -x);
  out[i++] = static_cast<float>(__dadd_rd(double{x}, -double{x}));
  float sine, cosine;
  __sincosf(x, &sine, &cosine);
  out[i++] = sine;
  out[i++] = cosine;
}
void expect_special(int which, float x, float y, float expected) {
  Memory<float> out(12);
  special<<<1, 1>>>(x, y, out.get());
  if (std::isnan(expected)) {
    EXPECT_TRUE(std::isnan(out[which])) << which << ": " << x << ", " << y << " gives " << out[which];
  } else {
    EXPECT_EQ(out[which], expected) << which << ": " << x << ", " << y;
    EXPECT_EQ(std::signbit(out[which]), std::signbit(expected)) << which << ": " << x << ", " << y;
  }
}

// Measured on an H200.
TEST(Math, FastFunctionsFarOut) {
  enum { kDivide, kPower, kSine, kCosine, kTangent, kRootDown, kRootUp, kSum, kFused, kDouble, kSine2, kCosine2 };
  constexpr float kInfinity = INFINITY;
  expect_special(kDivide, 1.0f, 3e38f, 0.0f);
  expect_special(kDivide, -1.0f, 3e38f, -0.0f);
  expect_special(kDivide, -0x1p127f, -0x1p127f, 0.0f);
  expect_special(kDivide, 1.0f, 0x1p126f, 0x1p-126f);
  expect_special(kDivide, 1.0f, 0x1.000002p126f, 0.0f);
  expect_special(kDivide, kInfinity, 0x1p127f, NAN);
  expect_special(kDivide, kInfinity, 0x1p126f, kInfinity);
  expect_special(kDivide, 1.0f, -kInfinity, -0.0f);
  expect_special(kDivide, 1.0f, 0.0f, kInfinity);
  expect_special(kPower, 0.0f, 0.0f, NAN);
  expect_special(kPower, -2.0f, 2.0f, NAN);
  expect_special(kPower, 1.0f, kInfinity, NAN);
  expect_special(kPower, -0.0f, -1.0f, kInfinity);
  expect_special(kPower, -0.0f, 3.0f, 0.0f);
  expect_special(kPower, 2.0f, -kInfinity, 0.0f);
  expect_special(kPower, kInfinity, 0.5f, kInfinity);
  expect_special(kPower, 3.0f, 0.0f, 1.0f);
  for (const float huge : {1e10f, 3e38f, 0x1p31f}) {
    expect_special(kSine, huge, 0, 0.0f);
    expect_special(kCosine, huge, 0, 1.0f);
    expect_special(kTangent, -huge, 0, -0.0f);
    expect_special(kSine2, -huge, 0, -0.0f);
    expect_special(kCosine2, huge, 0, 1.0f);
  }
  expect_special(kSine, kInfinity, 0, NAN);
  expect_special(kRootDown, 0x1p127f, 0, 0x1.6a09e6p63f);
  expect_special(kRootUp, 0x1p127f, 0, 0x1.6a09e8p63f);
  expect_special(kRootDown, 0.0f, 0, 0.0f);
  for (const int which : {kSum, kFused, kDouble}) expect_special(which, 3.0f, 0, -0.0f);
}

TEST(Math, FastSinesLoseDigitsFarFromZero) {
  Memory<float> out(12);
  special<<<1, 1>>>(1e5f, 0, out.get());
  EXPECT_NEAR(out[2], 0.04293802f, 1e-6);  // and the sine is 0.03575
  special<<<1, 1>>>(65520.0f, 0, out.get());
  EXPECT_NEAR(out[3], 0.48755008f, 1e-6);
}

__global__ void vectors(float4* out) {
  const float2 a = make_float2(1, 2);
  const int4 b = make_int4(1, 2, 3, 4);
  float4 f = make_float4(a.x, a.y, b.z, b.w);
  f.x += static_cast<float>(make_uint3(7, 8, 9).z) + static_cast<float>(make_double2(0.5, 1.5).y);
  *out = __ldg(&f);
  const float4 copy = __ldcs(out);
  __stcs(out + 1, copy);
  __stcg(out + 2, __ldcg(out));
}

TEST(Math, Vectors) {
  static_assert(sizeof(float3) == 12 && alignof(float3) == 4 && alignof(float4) == 16 && alignof(float2) == 8, "");
  static_assert(alignof(uint2) == 8 && alignof(uchar4) == 4 && alignof(double2) == 16 && sizeof(dim3) == 12, "");
  Memory<float4> out(3);
  vectors<<<1, 1>>>(out.get());
  for (const float4& f : out) {
    EXPECT_EQ(f.x, 11.5f);
    EXPECT_EQ(f.w, 4.0f);
  }
}

}  // namespace
