// What the rungs share: the sums that the gradients of a row need.
#pragma once

#include <kf/numeric.h>

namespace kf::KF_BACKEND::layer_norm_backward {

// grad · weight, rounded before anything is done with it. nvcc would make one FMA of the product and the subtraction of
// the average, and where the two are equal what the product was rounded by would remain, times rstd.
__device__ __forceinline__ float product(float grad, float weight) { return __fmul_rn(grad, weight); }
__device__ __forceinline__ double product(double grad, double weight) { return __dmul_rn(grad, weight); }

// Of a row, from its saved mean and rstd. The mean was rounded when it was saved; the sum of x − mean finds what is
// left of it, as in the forward pass (include/step3/statistics.h), and x̂ is (x − mean − rest)·rstd.
template <class C>
struct RowSums {
  C value[3] = {};  // of g, of g·(x − mean), of x − mean

  __device__ __forceinline__ void add(C g, C off) {
    value[0] += g;
    value[1] += g * off;
    value[2] += off;
  }
};

template <class C>
struct RowGradient {
  C mean;
  C rest;
  C rstd;
  C average_g;
  C average_gx;  // of g·x̂

  __device__ RowGradient(const RowSums<C>& sums, C mean, C rstd, int64_t width) : mean(mean), rstd(rstd) {
    const C share = C(1) / C(width);  // one division, not three
    rest = sums.value[2] * share;
    average_g = sums.value[0] * share;
    average_gx = (sums.value[1] * share - average_g * rest) * rstd;
  }

  __device__ __forceinline__ C normalized(C x) const { return (x - mean) * rstd - rest * rstd; }

  __device__ __forceinline__ C of_x(C g, C x_hat) const { return rstd * (g - average_g - x_hat * average_gx); }
};

}  // namespace kf::KF_BACKEND::layer_norm_backward
