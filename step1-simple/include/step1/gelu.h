// GELU, exact and as GPT-2 approximates it, with their derivatives. Hendrycks and Gimpel,
// https://arxiv.org/abs/1606.08415.
#pragma once

#include <cuda_runtime.h>
#include <kf/numeric.h>
#include <step1/approximate.h>

namespace kf::KF_BACKEND {

// ---- as the formulas are written ----

// x * Phi(x), Phi the normal distribution's cumulative function. erfc keeps its digits where 1 + erf would cancel.
__device__ __forceinline__ float gelu_erf(float x) { return 0.5f * x * erfcf(-x * 0.70710678118654752f); }
__device__ __forceinline__ double gelu_erf(double x) { return 0.5 * x * erfc(-x * 0.70710678118654752440); }

// GPT-2's gelu_new: Phi(x) is nearly (1 + tanh(u)) / 2 with u = sqrt(2/pi) * (x + 0.044715 x^3).
__device__ __forceinline__ float gelu_tanh(float x) {
  const float u = 0.79788456080286536f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1.0f + tanhf(u));
}
__device__ __forceinline__ double gelu_tanh(double x) {
  const double u = 0.79788456080286535588 * (x + 0.044715 * x * x * x);
  return 0.5 * x * (1.0 + tanh(u));
}

template <bool kTanh, class C>
__device__ __forceinline__ C gelu_of(C x) {
  return kTanh ? gelu_tanh(x) : gelu_erf(x);
}

// Beyond 16 the derivative is 0 or 1, and x^3 would overflow into inf - inf. NaN passes both comparisons and stays.
template <class C>
__device__ __forceinline__ C where_gelu_bends(C x) {
  return x > C(16) ? C(16) : (x < C(-16) ? C(-16) : x);
}

// Phi(x) + x phi(x), phi the density exp(-x^2/2) / sqrt(2 pi).
__device__ __forceinline__ float gelu_erf_slope(float x) {
  return 0.5f * erfcf(-x * 0.70710678118654752f) + x * 0.39894228040143268f * expf(-0.5f * x * x);
}
__device__ __forceinline__ double gelu_erf_slope(double x) {
  return 0.5 * erfc(-x * 0.70710678118654752440) + x * 0.39894228040143267794 * exp(-0.5 * x * x);
}

// (1 + t)/2 + x (1 - t^2) u'/2 with t = tanh(u).
__device__ __forceinline__ float gelu_tanh_slope(float x) {
  const float t = tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x));
  const float u_slope = 0.79788456080286536f * (1.0f + 0.134145f * x * x);
  return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * u_slope;
}
__device__ __forceinline__ double gelu_tanh_slope(double x) {
  const double t = tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x));
  const double u_slope = 0.79788456080286535588 * (1.0 + 0.134145 * x * x);
  return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * u_slope;
}

template <bool kTanh, class C>
__device__ __forceinline__ C gelu_slope(C x) {
  x = where_gelu_bends(x);
  return kTanh ? gelu_tanh_slope(x) : gelu_erf_slope(x);
}

// ---- in as few instructions as float32 allows ----

// (1 + tanh(u)) / 2 is 1 / (1 + exp(-2u)), and exp(-2u) is 2^(x (a + b x^2)): the constants of u, of the 2 and of
// log2(e) are multiplied beforehand. tanhf takes about twenty instructions and a branch; this takes six.
__device__ __forceinline__ float gelu_tanh_gate(float x) {
  const float exponent = x * (-2.3022082f - 0.10294324f * x * x);
  return reciprocal_approx(1.0f + exp2_approx(exponent));
}

// Phi(x): for a = |x| and t = 1 / (1 + 0.36 a), 1 - Phi(a) = exp(-a^2/2) t P(t) as in Abramowitz and Stegun 7.1.26,
// with a longer P, fitted for this file by weighted least squares on [0, 15] in float64: relative error below 1.1e-6.
__device__ __forceinline__ float gelu_erf_gate(float x) {
  const float a = fabsf(x);
  const float t = reciprocal_approx(1.0f + 0.36f * a);
  float p = 0.0465297825f;
  p = p * t - 0.177960027f;
  p = p * t + 0.178499034f;
  p = p * t + 0.0282351615f;
  p = p * t + 0.139107026f;
  p = p * t + 0.141883229f;
  p = p * t + 0.143705284f;
  const float tail = p * t * exp2_approx(-0.72134752f * a * a);
  return x > 0.0f ? 1.0f - tail : tail;
}

// GELU for T with the least work that T's digits need: in float32 the exact one keeps erfcf, in float64 nothing
// changes.
template <class T, bool kTanh>
__device__ __forceinline__ compute_t<T> fast_gelu(compute_t<T> x) {
  if constexpr (sizeof(T) == 8 || (sizeof(T) == 4 && !kTanh)) {
    return gelu_of<kTanh>(x);
  } else {
    return x * (kTanh ? gelu_tanh_gate(x) : gelu_erf_gate(x));
  }
}

// With the gate s = 1 / (1 + exp(-2u)), t = 2s - 1 and 1 - t^2 = 4 s (1 - s).
template <class T, bool kTanh>
__device__ __forceinline__ compute_t<T> fast_gelu_slope(compute_t<T> x) {
  if constexpr (sizeof(T) == 8 || (sizeof(T) == 4 && !kTanh)) {
    return gelu_slope<kTanh>(x);
  } else if constexpr (kTanh) {
    x = where_gelu_bends(x);
    const float s = gelu_tanh_gate(x);
    return s + s * (1.0f - s) * x * (1.5957691f + 0.21406445f * x * x);
  } else {
    x = where_gelu_bends(x);
    return gelu_erf_gate(x) + x * 0.39894228f * exp2_approx(-0.72134752f * x * x);
  }
}

}  // namespace kf::KF_BACKEND
