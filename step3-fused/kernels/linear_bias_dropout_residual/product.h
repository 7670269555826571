// linear_bias_dropout_residual's product and its end as the rungs hand them on.
#pragma once

#include <step3/epilogues.h>

#include "rungs.h"

namespace kf::KF_BACKEND::linear_bias_dropout_residual {

template <class T>
DropoutResidualEpilogue<T> epilogue_of(const Args& a) {
  using C = compute_t<T>;
  return {Rows<T>(a.y, a.rows, a.width), Rows<T>(a.residual, a.rows, a.width),
          ElementwiseDropout<C>{{a.rng_state, a.seed, a.offset}, a.threshold, keep_scale<C>(a.threshold)}};
}

}  // namespace kf::KF_BACKEND::linear_bias_dropout_residual
