// Softmax over scores that arrive bit by bit: Milakov and Gimelshein, https://arxiv.org/abs/1805.02867.
//
// softmax_j = exp(score_j − max) / sum, where max is the greatest score and sum adds all exp(score_j − max). The
// greatest score is known only at the end. So keep the greatest so far; when a greater one comes, multiply what was
// added up before by exp(old max − new max), and it is as if the new one had been known from the start.
#pragma once

#include <cuda_runtime.h>
#include <math.h>
#include <step1/approximate.h>

namespace kf::KF_BACKEND {

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
constexpr double kLog2e = 1.4426950408889634;  // eˣ is 2 to the power of x·log₂e

// How far, in powers of 2, the maximum that a rung subtracts may stay behind the true one. Weights are then at most 2⁸
// times what they would be, which changes neither their relative error nor the quotient, and what was accumulated is
// rarely multiplied. An idea of FlashAttention-4.
constexpr float kMaxLag = 8;

__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }

template <class C>
struct OnlineSoftmax {
  C max = -INFINITY;  // nothing seen yet. Not 0 or some small number: all scores may be smaller still
  C sum = 0;

  // The weight of a score, to be divided by `sum` in the end. A masked score, −inf, weighs nothing; asking exp would
  // give exp(−inf − (−inf)), NaN, as long as everything was masked.
  __device__ C weight(C score) const { return score == C(-INFINITY) ? C(0) : exponential(score - max); }

  // Raises the maximum to `score`, where that is greater. Returns the factor for what was accumulated before; `sum` is
  // multiplied already. For a tile of scores: raise(their maximum), then add each weight(score) to `sum`.
  __device__ C raise(C score) {
    const C before = max;
    max = score > max ? score : max;
    const C factor = before == max ? C(1) : exponential(before - max);
    sum *= factor;
    return factor;
  }

  // ln Σ exp(score), the logarithm of what weights relative to 0 would be divided by; −inf where nothing was seen.
  __device__ C log_sum_exp() const { return max + logarithm(sum); }

  // Takes in one score. Returns the factor for what was accumulated before; the score's own factor is weight(score).
  __device__ C push(C score) {
    const C factor = raise(score);
    sum += weight(score);
    return factor;
  }

  // Takes in what somebody else has seen. Returns the factor for what was accumulated here before; the factor for what
  // the other accumulated is weight(other.max).
  __device__ C merge(const OnlineSoftmax& other) {
    const C factor = raise(other.max);
    sum += other.sum * weight(other.max);
    return factor;
  }
};

}  // namespace kf::KF_BACKEND
