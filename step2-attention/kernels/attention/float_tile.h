// Tiles of rows in shared memory as float, for the rungs on CUDA cores.
#pragma once

#include <kf/numeric.h>
#include <step1/vector.h>

#include <cstdint>
#include <string>

#include "rungs.h"

namespace kf::KF_BACKEND::attention {

using Four = Vector<float, 4>;

// The rows from `begin` on, kDim columns each, by kThreads threads; zero where there is none before `end`, or no
// column.
template <int kRows, int kDim, int kThreads, class T>
__device__ void load_tile(Four* tile, const T* rows, int64_t stride, int64_t begin, int64_t end, int64_t columns) {
  float* element = reinterpret_cast<float*>(tile);
  for (int i = threadIdx.x; i < kRows * kDim; i += kThreads) {
    const int64_t row = begin + i / kDim;
    const int column = i % kDim;
    element[i] = row < end && column < columns ? to_compute(rows[row * stride + column]) : 0.0f;
  }
}

// Why such rungs cannot hold a row, or "".
inline std::string can_implement_float_tile(const Args& a) {
  if (a.dtype == DType::kFloat64) return "takes float32, float16 or bfloat16, got float64";
  return a.head_dim <= 256 ? "" : "takes head_dim ≤ 256, got " + std::to_string(a.head_dim);
}

}  // namespace kf::KF_BACKEND::attention
