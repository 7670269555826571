// x and weight as the rungs for CUDA cores see them.
#pragma once

#include <kf/launch.h>
#include <kf/numeric.h>

#include <string>

#include "rungs.h"

namespace kf::KF_BACKEND::linear {

// A matrix whose elements lie `row` and `column` elements apart: one of the two is 1.
template <class T>
struct Matrix {
  const T* data;
  int64_t row, column;

  __device__ T at(int64_t r, int64_t c) const { return data[r * row + c * column]; }
};

template <class T>
Matrix<T> x_of(const Args& a) {
  const auto data = static_cast<const T*>(a.x);
  return a.x_transposed ? Matrix<T>{data, 1, a.rows} : Matrix<T>{data, a.depth, 1};
}

template <class T>
Matrix<T> weight_of(const Args& a) {
  const auto data = static_cast<const T*>(a.weight);
  return a.weight_transposed ? Matrix<T>{data, 1, a.depth} : Matrix<T>{data, a.width, 1};
}

// The same with its columns as rows, for loops that treat x and weight alike.
template <class T>
Matrix<T> weight_columns_of(const Args& a) {
  const Matrix<T> weight = weight_of<T>(a);
  return {weight.data, weight.column, weight.row};
}

// A column's bias; 0 where there is none.
template <class T>
__device__ __forceinline__ compute_t<T> bias_at(const T* bias, int64_t column) {
  return bias == nullptr ? compute_t<T>(0) : to_compute(bias[column]);
}

// For grids with the columns' tiles along x and the rows' along y: why a product needs too large a one, or "".
template <int kRows, int kColumns>
std::string can_implement_grid(const Args& a) {
  constexpr int64_t kMostRows = int64_t{kRows} * 65535, kMostColumns = int64_t{kColumns} * INT32_MAX;
  if (a.rows > kMostRows) return "takes rows ≤ " + std::to_string(kMostRows) + ", got " + std::to_string(a.rows);
  if (a.width <= kMostColumns) return "";
  return "takes width ≤ " + std::to_string(kMostColumns) + ", got " + std::to_string(a.width);
}

}  // namespace kf::KF_BACKEND::linear
