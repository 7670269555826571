// Mean and spread of a row, as LayerNorm needs them: Ba, Kiros and Hinton, https://arxiv.org/abs/1607.06450.
//
// Two passes. E[x²] − E[x]² in one pass would subtract two numbers that agree in most of their digits where the mean is
// large, and lose the variance. The first pass's mean is itself rounded (by 0.0005 where it is near 10000), so the
// second pass also adds up x − mean: what it finds is the rest of the mean.
#pragma once

#include <kf/numeric.h>
#include <step2/reduce.h>

namespace kf::KF_BACKEND {

// 1/√x. Of a float by the instruction for it, which is off by two units in the last place at most; a root and a
// division take many.
__device__ __forceinline__ float reciprocal_root(float x) { return rsqrtf(x); }
__device__ __forceinline__ double reciprocal_root(double x) { return 1 / sqrt(x); }

template <class C>
struct Statistics {
  C mean;
  C rest;  // the mean is mean + rest, in more digits than one C holds
  C rstd;  // 1/sqrt(variance + eps); the variance is the biased one, divided by width, and eps stands under the root

  // (x − mean − rest)·rstd, of which rest·rstd is the same for the whole row: two instructions, not three.
  __device__ __forceinline__ C normalize(C x) const { return (x - mean) * rstd - rest * rstd; }
};

// Where mean and rstd of each row go, for the backward pass; null where nobody wants them.
template <class C>
struct Kept {
  C* mean;
  C* rstd;

  __device__ void keep(int64_t row, const Statistics<C>& s) const {
    if (mean != nullptr) mean[row] = s.mean + s.rest;
    if (rstd != nullptr) rstd[row] = s.rstd;
  }
};

template <class T, class Args>
Kept<compute_t<T>> kept_of(const Args& a) {
  return {static_cast<compute_t<T>*>(a.mean), static_cast<compute_t<T>*>(a.rstd)};
}

// From the sums over a row of x − mean and of its square.
template <class C>
__device__ Statistics<C> statistics(C mean, C sum, C sum_of_squares, int64_t width, C eps) {
  const C share = C(1) / C(width), rest = sum * share;
  return {mean, rest, reciprocal_root(sum_of_squares * share - rest * rest + eps)};
}

// By one warp, from the `width` values that value(column) gives. Every lane gets the result.
template <class C, class Value>
__device__ Statistics<C> warp_statistics(int64_t width, C eps, Value value) {
  const int lane = threadIdx.x % kWarpSize;
  C total = 0;
  for (int64_t c = lane; c < width; c += kWarpSize) total += value(c);
  const C mean = warp_sum(total) / C(width);
  C sum = 0;
  C sum_of_squares = 0;
  for (int64_t c = lane; c < width; c += kWarpSize) {
    const C off = value(c) - mean;
    sum += off;
    sum_of_squares += off * off;
  }
  return statistics(mean, warp_sum(sum), warp_sum(sum_of_squares), width, eps);
}

}  // namespace kf::KF_BACKEND
