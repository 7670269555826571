// The bias of N neighbours of a matrix that is read as one long array.
#pragma once

#include <step1/fast_divide.h>
#include <step1/vector.h>

namespace kf::KF_BACKEND {

// bias[column], bias[column + 1], … for N elements from `column` on. kWhole: N divides the width, so they lie in one
// piece and aligned. Otherwise they are read one by one, and after the last column comes the first.
template <bool kWhole, int N, class T>
__device__ __forceinline__ void load_bias(const T* bias, int64_t column, int64_t width, compute_t<T> (&value)[N]) {
  if constexpr (kWhole) {
    load_values<true>(bias + column, value);
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      value[j] = to_compute(bias[column]);
      if (++column == width) column = 0;
    }
  }
}

}  // namespace kf::KF_BACKEND
