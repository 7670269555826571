// The functions that kernels use.
#include <gtest/gtest.h>

#include <climits>
#include <cmath>
#include <cstdint>

#include "memory.h"

namespace {

using test::Memory;

__global__ void functions(float x, float* out) {
  int i = 0;
  out[i++] = expf(x);
  out[i++] = __expf(x);
  out[i++] = exp2f(x);
  out[i++] = exp10f(x);
  out[i++] = logf(x);
  out[i++] = __logf(x);
  out[i++] = __log2f(x);
  out[i++] = log1pf(x);
  out[i++] = expm1f(x);
  out[i++] = sqrtf(x);
  out[i++] = rsqrtf(x);
  out[i++] = __frsqrt_rn(x);
  out[i++] = __frcp_rn(x);
  out[i++] = __fdividef(x, 3.0f);
  out[i++] = tanhf(x);
  out[i++] = erff(x);
  out[i++] = erfcf(x);
  out[i++] = powf(x, 2.5f);
  out[i++] = __powf(x, 2.5f);
  out[i++] = sinf(x);
  out[i++] = __cosf(x);
  out[i++] = fmaf(x, x, 1.0f);
  out[i++] = __fmaf_rn(x, x, 1.0f);
  out[i++] = fmaxf(x, NAN);
  out[i++] = fminf(x, 0.25f);
  out[i++] = fabsf(-x);
  out[i++] = floorf(x) + ceilf(x) + truncf(-x) + rintf(2.5f);
  out[i++] = fmodf(7.5f, 2.0f);
  out[i++] = cbrtf(x);
  out[i++] = __saturatef(x) + __saturatef(-x);
  out[i++] = normcdff(x);
  float s, c;
  sincosf(x, &s, &c);
  out[i++] = s * s + c * c;
  out[i++] = copysignf(x, -1.0f);
  out[i++] = ldexpf(x, 3);
}

TEST(Math, FloatFunctions) {
  const double x = 1.25;
  const double expected[] = {std::exp(x),
                             std::exp(x),
                             std::exp2(x),
                             std::pow(10, x),
                             std::log(x),
                             std::log(x),
                             std::log2(x),
                             std::log1p(x),
                             std::expm1(x),
                             std::sqrt(x),
                             1 / std::sqrt(x),
                             1 / std::sqrt(x),
                             1 / x,
                             x / 3,
                             std::tanh(x),
                             std::erf(x),
                             std::erfc(x),
                             std::pow(x, 2.5),
                             std::pow(x, 2.5),
                             std::sin(x),
                             std::cos(x),
                             x * x + 1,
                             x * x + 1,
                             x,
                             0.25,
                             x,
                             1 + 2 - 1 + 2,
                             1.5,
                             std::cbrt(x),
                             1,
                             0.5 * std::erfc(-x / std::sqrt(2.0)),
                             1,
                             -x,
                             10};
  Memory<float> out(sizeof(expected) / sizeof(expected[0]));
  functions<<<1, 1>>>(1.25f, out.get());
  for (std::size_t i = 0; i < out.size(); ++i) EXPECT_NEAR(out[i], expected[i], 4e-7 * std::fabs(expected[i])) << i;
}

__global__ void double_functions(double x, double* out) {
  out[0] = exp(x);
  out[1] = rsqrt(x);
  out[2] = fma(x, x, 1.0);
  out[3] = tanh(x) + erf(x);
  out[4] = max(x, 2.0) + min(x, 1.0f);
  out[5] = __dsqrt_rn(x) + __drcp_rn(x);
}

TEST(Math, DoubleFunctions) {
  const double x = 1.25;
  const double expected[] = {std::exp(x), 1 / std::sqrt(x),    x * x + 1, std::tanh(x) + std::erf(x),
                             3,           std::sqrt(x) + 1 / x};
  Memory<double> out(6);
  double_functions<<<1, 1>>>(x, out.get());
  for (int i = 0; i < 6; ++i) EXPECT_NEAR(out[i], expected[i], 1e-15 * std::fabs(expected[i])) << i;
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
