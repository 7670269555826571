// Tiles of rows in shared memory as float, for the rungs on CUDA cores.
#pragma once

#include <kf/numeric.h>
#include <step1/vector.h>
#include <step2/attention/rows.h>

#include <cstdint>
#include <string>

#include "rungs.h"

namespace kf::KF_BACKEND::attention {

using Four = Vector<float, 4>;

// Rows of kGroup · kColumns columns, for a block of kThreads. kGroup neighbouring lanes share a row, kColumns columns
// each. Columns go round the lanes in fours: kGroup lanes read 16 · kGroup bytes in a row, no bank conflicts.
template <int kRows, int kGroup, int kColumns, int kThreads>
struct FloatTile {
  static constexpr int kFours = kColumns / 4;
  Four four[kRows * kFours * kGroup];

  // Of lane `part` of kGroup: its f-th four columns of a row, and which column of the row its c-th is.
  __device__ const Four& at(int row, int part, int f) const { return four[(row * kFours + f) * kGroup + part]; }
  static __device__ int column(int part, int c) { return (c / 4 * kGroup + part) * 4 + c % 4; }

  // The rows from `begin` on, `columns` of each; zero where there is none before `end`, or no column.
  template <class T>
  __device__ void load(const Rows<const T>& rows, int64_t begin, int64_t end, int64_t columns) {
    constexpr int kDim = kColumns * kGroup;
    float* element = reinterpret_cast<float*>(four);
    for (int i = threadIdx.x; i < kRows * kDim; i += kThreads) {
      const int64_t row = begin + i / kDim;
      const int column = i % kDim;
      element[i] = row < end && column < columns ? to_compute(rows.first[row * rows.stride + column]) : 0.0f;
    }
  }
};

// Why such rungs cannot hold a row, or "".
inline std::string can_implement_float_tile(const Args& a) {
  if (a.dtype == DType::kFloat64) return "takes float32, float16 or bfloat16, got float64";
  return a.head_dim <= 256 ? "" : "takes head_dim ≤ 256, got " + std::to_string(a.head_dim);
}

}  // namespace kf::KF_BACKEND::attention
