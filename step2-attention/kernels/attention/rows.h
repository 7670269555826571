// Where a row of q, k, v or the output lies.
#pragma once

#include <cuda_runtime.h>

#include "rungs.h"

namespace kf::KF_BACKEND::attention {

// The first element of row `position`, where `head` counts through all heads of all batches.
template <class T>
__device__ T* row_of(T* first, const Strides& stride, int64_t head, int64_t heads, int64_t position) {
  return first + head / heads * stride.batch + head % heads * stride.head + position * stride.seq;
}

}  // namespace kf::KF_BACKEND::attention
