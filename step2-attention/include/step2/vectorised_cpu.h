// For the plain C++ versions: loops that compilers turn into vector instructions, and nothing machine-specific.
//
// A compiler vectorises a loop when it runs over contiguous memory, calls no function that it cannot see into, and adds
// up nothing in an order that it would have to change. Hence an exponential written out, and sums in 64 parts.
#pragma once

#include <step1/vectorised_cpu.h>

#include <cmath>
#include <cstdint>
#include <cstring>

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

// The sum of n parts, a power of two.
template <class C, size_t n>
KF_CPU_INLINE C sum_of(C (&part)[n]) {
  for (size_t half = n / 2; half > 0; half /= 2) {
    for (size_t l = 0; l < half; ++l) part[l] += part[l + half];
  }
  return part[0];
}

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
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t l = 0; l < half; ++l) part[l] = part[l + half] > part[l] ? part[l + half] : part[l];
  }
  return part[0];
}

// Σ x[i]·y[i] over n values.
template <class C>
KF_CPU_INLINE C dot(const C* x, const C* y, int64_t n) {
  C part[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) part[l] += x[i + l] * y[i + l];
  }
  for (; i < n; ++i) part[0] += x[i] * y[i];
  return sum_of(part);
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
  return sum_of(part);
}

// kBytes bytes of neighbouring elements: one register, or as many as the machine needs for it.
template <class C, int kBytes>
struct Register {
  typedef C type __attribute__((vector_size(kBytes)));
};

// c[kRows, n] += a[kRows, k] · b[k, n], n as many elements as kVectors registers hold. c stays in registers from the
// first to the last k, and what is loaded of a and b is used kVectors or kRows times.
template <int kRows, int kVectors, int kBytes, class C>
KF_CPU_INLINE void multiply_add_tile(const C* a, int64_t a_stride, const C* b, int64_t b_stride, C* c, int64_t c_stride,
                                     int64_t k) {
  using V = typename Register<C, kBytes>::type;
  constexpr int64_t kWidth = kBytes / sizeof(C);
  V sum[kRows][kVectors];
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVectors; ++j) std::memcpy(&sum[i][j], c + i * c_stride + j * kWidth, kBytes);
  }
  for (int64_t p = 0; p < k; ++p) {
    V row[kVectors];
    for (int j = 0; j < kVectors; ++j) std::memcpy(&row[j], b + p * b_stride + j * kWidth, kBytes);
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kVectors; ++j) sum[i][j] += a[i * a_stride + p] * row[j];
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVectors; ++j) std::memcpy(c + i * c_stride + j * kWidth, &sum[i][j], kBytes);
  }
}

// c[m, n] += a[m, k] · b[k, n]. m must be a multiple of kRows; n is rounded up to whole registers, and so far must b
// and c be there.
template <int kRows, int kVectors, int kBytes, class C>
KF_CPU_INLINE void multiply_add(const C* a, int64_t a_stride, const C* b, int64_t b_stride, C* c, int64_t c_stride,
                                int64_t m, int64_t n, int64_t k) {
  constexpr int64_t kWidth = kBytes / sizeof(C);
  int64_t j = 0;
  for (; j + kVectors * kWidth <= n; j += kVectors * kWidth) {
    for (int64_t i = 0; i < m; i += kRows) {
      multiply_add_tile<kRows, kVectors, kBytes>(a + i * a_stride, a_stride, b + j, b_stride, c + i * c_stride + j,
                                                 c_stride, k);
    }
  }
  for (; j < n; j += kWidth) {
    for (int64_t i = 0; i < m; i += kRows) {
      multiply_add_tile<kRows, 1, kBytes>(a + i * a_stride, a_stride, b + j, b_stride, c + i * c_stride + j, c_stride,
                                          k);
    }
  }
}

// f.run<kRows, kVectors, kBytes>(), compiled for the machine at hand: multiply_add keeps kRows × kVectors registers of
// kBytes, most of those that there are, so that a row of the other factor finds room as well. F::run must be
// KF_CPU_INLINE. x86-64 has 32 registers of 64 bytes, 16 of 32 or 16 of 16; KF_CPU_CLONES could not tell them apart.
#if defined(__x86_64__) && defined(__GNUC__)
template <class F>
__attribute__((target("arch=x86-64-v4"))) void with_registers_v4(const F& f) {
  f.template run<6, 4, 64>();
}
template <class F>
__attribute__((target("arch=x86-64-v3"))) void with_registers_v3(const F& f) {
  f.template run<6, 2, 32>();
}
template <class F>
void with_registers(const F& f) {
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    with_registers_v4(f);
  } else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    with_registers_v3(f);
  } else {
    f.template run<6, 2, 16>();
  }
}
#else
template <class F>
void with_registers(const F& f) {
  f.template run<6, 4, 16>();  // 32 registers of 16 bytes, as aarch64 has
}
#endif
constexpr int64_t kRegisterRows = 6;  // kRows on all of them

// Elements up to the next whole register of 64 bytes, the widest.
template <class C>
constexpr int64_t padded(int64_t n) {
  constexpr int64_t kWidest = 64 / sizeof(C);
  return (n + kWidest - 1) / kWidest * kWidest;
}

}  // namespace kf::cpu
