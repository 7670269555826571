// What every rung does: a thread owns N columns, and adds them up over the rows that it is given.
#pragma once

#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/vector.h>

#include "rungs.h"

namespace kf::KF_BACKEND::embedding_backward {

constexpr int kThreads = 256;
constexpr int kInFlight = 8;  // loads that do not wait for each other

// Adds row(i), row(i + 1) … to `sum`, in this order: as many as are in flight together, or `count` of them.
template <int N, bool kAll, class C, class Row>
__device__ __forceinline__ void add_together(int64_t i, int64_t count, Row row, C (&sum)[N]) {
  decltype(load_vector<N>(row(0))) loaded[kInFlight];
#pragma unroll
  for (int r = 0; r < kInFlight; ++r) {
    if (kAll || r < count) loaded[r] = load_vector<N>(row(i + r));
  }
#pragma unroll
  for (int r = 0; r < kInFlight; ++r) {
    if (!kAll && r >= count) return;
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] += to_compute(loaded[r].element[j]);
  }
}

// Adds row(first), row(first + 1) … row(last - 1), one after the other, to `sum`. row gives an address.
template <int N, class C, class Row>
__device__ __forceinline__ void add_rows(int64_t first, int64_t last, Row row, C (&sum)[N]) {
  int64_t i = first;
  for (; i + kInFlight <= last; i += kInFlight) add_together<N, true>(i, kInFlight, row, sum);
  add_together<N, false>(i, last - i, row, sum);
}

// A block has the shape of rows: x threads hold its columns, or a part of them, and y rows stand side by side.
struct Shape {
  int64_t blocks_a_row, x, y;

  dim3 grid(int64_t rows) const { return dim3(static_cast<unsigned>(ceil_div(rows, y) * blocks_a_row)); }
  dim3 block() const { return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y)); }
};

inline Shape shape_for(int64_t width, int64_t columns_a_thread) {
  const int64_t pieces = ceil_div(width, columns_a_thread);
  const int64_t blocks_a_row = ceil_div(pieces, kThreads);
  const int64_t x = ceil_div(pieces, blocks_a_row);
  return {blocks_a_row, x, kThreads / x};
}

// Of the thread that asks: its row and its first column.
__device__ __forceinline__ int64_t row_of(unsigned blocks_a_row) {
  return int64_t{blockIdx.x / blocks_a_row} * blockDim.y + threadIdx.y;
}
__device__ __forceinline__ int64_t column_of(unsigned blocks_a_row, int columns_a_thread) {
  return (int64_t{blockIdx.x % blocks_a_row} * blockDim.x + threadIdx.x) * columns_a_thread;
}

// Calls f with T{} and the columns a thread may take: those of 16 bytes, or one.
template <class F>
void with_columns(const Args& a, F&& f) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    constexpr int kVector = 16 / sizeof(T);
    if (a.width % kVector == 0 && aligned_16(a.grad, a.y)) {
      f(type, std::integral_constant<int, kVector>());
    } else {
      f(type, std::integral_constant<int, 1>());
    }
  });
}

}  // namespace kf::KF_BACKEND::embedding_backward
