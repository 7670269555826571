// What every rung asks of a token: which row of the position table it takes.
#pragma once

#include <cuda_runtime.h>

#include "rungs.h"

namespace kf::KF_BACKEND::embedding {

// Of token `token` of sequence `batch`; position_rows or more where the table ends before it.
__device__ __forceinline__ int64_t place_of(const Args& a, int64_t batch, int64_t token) {
  const int64_t place = a.position + token + (a.positions == nullptr ? 0 : a.positions[batch]);
  return place < 0 ? 0 : place;
}

}  // namespace kf::KF_BACKEND::embedding
