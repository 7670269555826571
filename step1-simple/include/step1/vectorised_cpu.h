// For the plain C++ versions: what a compiler needs to turn a loop into vector instructions. No part of the lesson.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

// x86-64 without flags means SSE2, of 2003. GCC can compile a function several times and let the loader choose.
#if defined(__x86_64__) && defined(__ELF__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define KF_CPU_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define KF_CPU_CLONES
#endif
#define KF_CPU_INLINE inline __attribute__((always_inline))  // into each of the versions

namespace kf::cpu {

// exp by arithmetic alone, where std::exp would be a call for each element. Relative error below 2e-7; infinity above
// 88, and below -87 a number near 1e-38. x = n·ln 2 + r with |r| ≤ ln 2 / 2: a polynomial gives exp(r) (Cephes, expf),
// and n goes straight into the exponent bits.
KF_CPU_INLINE float vector_exp(float x) {
  const float bounded = x > -87.0f ? (x < 88.0f ? x : 88.0f) : -87.0f;
  const float n = (bounded * 1.44269504f + 12582912.0f) - 12582912.0f;  // 1.5·2²³: the sum has no bits for a fraction
  const float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;    // ln 2 in two parts, the first one exact
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) * (1 << 23);
  float two_to_n;
  std::memcpy(&two_to_n, &bits, sizeof two_to_n);
  return x < 88.0f ? (p * r * r + r + 1.0f) * two_to_n : std::numeric_limits<float>::infinity();
}
KF_CPU_INLINE double vector_exp(double x) { return std::exp(x); }

// erfc, right to 2e-7: Abramowitz and Stegun, Handbook of Mathematical Functions, formula 7.1.26.
KF_CPU_INLINE float vector_erfc(float x) {
  const float size = x < 0.0f ? -x : x;
  const float t = 1.0f / (1.0f + 0.3275911f * size);
  float p = 1.061405429f;
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const float tail = p * t * vector_exp(-size * size);
  return x < 0.0f ? 2.0f - tail : tail;
}
KF_CPU_INLINE double vector_erfc(double x) { return std::erfc(x); }

}  // namespace kf::cpu
