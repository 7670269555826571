// GELU, exact and as GPT-2 approximates it. Hendrycks and Gimpel, https://arxiv.org/abs/1606.08415.
#pragma once

#include <cuda_runtime.h>

namespace kf::KF_BACKEND {

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

}  // namespace kf::KF_BACKEND
