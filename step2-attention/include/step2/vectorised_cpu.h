// For the plain C++ versions: three loops that compilers turn into vector instructions, and nothing machine-specific.
//
// A compiler vectorises a loop when it runs over contiguous memory, calls no function that it cannot see into, and adds
// up nothing in an order that it would have to change. Hence an exponential written out, and sums in 64 parts.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

// x86-64 without flags means SSE2, of 2003. GCC can compile a function several times and let the loader choose.
#if defined(__x86_64__) && defined(__ELF__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define KF_CPU_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define KF_CPU_CLONES
#endif
#define KF_CPU_INLINE inline __attribute__((always_inline))  // into each of the versions

namespace kf::cpu {

constexpr int64_t kLanes = 64;

// exp(x) for x ≤ 0, relative error below 2e-7; 0 below −87, where float32 runs out of exponents. x = n·ln 2 + r with
// |r| ≤ ln 2 / 2: exp(r) by its series, and n goes straight into the result's exponent bits.
KF_CPU_INLINE float exp_of_nonpositive(float x) {
  const float clamped = x < -87.0f ? -87.0f : x;                       // NaN stays NaN
  const float shifted = clamped * 1.44269504088896341f + 12582912.0f;  // 1.5·2²³: the low bits now hold n, rounded
  const float n = shifted - 12582912.0f;
  const float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts, the first one exact
  float power = 1.0f / 720;
  power = power * r + 1.0f / 120;
  power = power * r + 1.0f / 24;
  power = power * r + 1.0f / 6;
  power = power * r + 0.5f;
  power = power * r + 1.0f;
  power = power * r + 1.0f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return x < -87.0f ? 0.0f : power * scale;
}
KF_CPU_INLINE double exp_of_nonpositive(double x) { return std::exp(x); }

// The greatest of n values; −inf for none.
template <class C>
KF_CPU_INLINE C max_of(const C* x, int64_t n) {
  C part[kLanes];
  for (C& p : part) p = -INFINITY;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) part[l] = x[i + l] > part[l] ? x[i + l] : part[l];
  }
  for (; i < n; ++i) part[0] = x[i] > part[0] ? x[i] : part[0];
  return *std::max_element(part, part + kLanes);
}

// y[i] = exp(x[i] − max) for n values, max their greatest or greater; y may be x. Returns their sum.
template <class C>
KF_CPU_INLINE C exp_and_sum(const C* x, C* y, int64_t n, C max) {
  for (int64_t i = 0; i < n; ++i) y[i] = exp_of_nonpositive(x[i] - max);
  C part[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) part[l] += y[i + l];
  }
  for (; i < n; ++i) part[0] += y[i];
  C sum = 0;
  for (const C p : part) sum += p;
  return sum;
}

// c[m, n] += a[m, k] · b[k, n]. Eight rows of b at a time: c is loaded and stored once for eight multiplications.
template <class C>
KF_CPU_INLINE void multiply_add(const C* __restrict__ a, int64_t a_stride, const C* __restrict__ b, int64_t b_stride,
                                C* __restrict__ c, int64_t c_stride, int64_t m, int64_t n, int64_t k) {
  int64_t p = 0;
  for (; p + 8 <= k; p += 8) {
    const C* const rows = b + p * b_stride;
    for (int64_t i = 0; i < m; ++i) {
      const C* const x = a + i * a_stride + p;
      C* const sum = c + i * c_stride;
      for (int64_t j = 0; j < n; ++j) {
        C s = sum[j];
        for (int64_t r = 0; r < 8; ++r) s += x[r] * rows[r * b_stride + j];
        sum[j] = s;
      }
    }
  }
  for (; p < k; ++p) {
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) c[i * c_stride + j] += a[i * a_stride + p] * b[p * b_stride + j];
    }
  }
}

}  // namespace kf::cpu
