// What layer_norm_linear's rungs share: its product, and the statistics of x's rows as a kernel of its own.
#pragma once

#include <step3/held_row.h>
#include <step3/product.h>
#include <step3/prologues.h>

#include "rungs.h"

namespace kf::KF_BACKEND::layer_norm_linear {

// statistics[row] = mean, what the mean lacks, rstd, nothing. Row as layer_norm's v3_registers.
template <class Row, class T>
__global__ void __launch_bounds__(Row::kThreads* kRowsOfBlock<Row>)
    statistics_kernel(const T* __restrict__ x, float* __restrict__ statistics, Kept<float> kept, int64_t rows,
                      int width, float eps) {
  __shared__ float shared[3 * Row::kThreads / kWarpSize];
  const int64_t row = int64_t{blockIdx.x} * kRowsOfBlock<Row> + threadIdx.y;
  if (row >= rows) return;  // a whole warp; a block that takes a row has one
  x += row * width;
  float value[Row::kItems][Row::N] = {};
  Row::for_each_piece(width, [&](int i, int column) { widen(load_vector<Row::N>(x + column), value[i]); });
  const Statistics<float> s = held_statistics<Row>(HeldValues<Row, float>{value}, width, eps, shared);
  if (threadIdx.x != 0) return;
  kept.keep(row, s);
  store_vector<4>(statistics + row * 4, Vector<float, 4>{{s.mean, s.rest, s.rstd, 0.0f}});
}

template <class T>
void launch_statistics(const Args& a, float* statistics, void* stream) {
  with_held_row<T>(a.depth, aligned_16(a.x), [&](auto shape) {
    using Row = decltype(shape);
    constexpr int kRows = kRowsOfBlock<Row>;
    statistics_kernel<Row>
        <<<static_cast<unsigned>(ceil_div(a.rows, kRows)), dim3(Row::kThreads, kRows), 0, as_stream(stream)>>>(
            static_cast<const T*>(a.x), statistics, kept_of<T>(a), a.rows, static_cast<int>(a.depth),
            static_cast<float>(a.eps));
  });
  check_launch();
}

// Why the prologue cannot take these, or "".
inline std::string can_implement_prologue(const Args& a) {
  if (reinterpret_cast<uintptr_t>(a.norm_weight) % 4 != 0 || reinterpret_cast<uintptr_t>(a.norm_bias) % 4 != 0) {
    return "takes LayerNorm's weight and bias that begin at multiples of 4 bytes";
  }
  if (a.depth > 16384) return "takes depth ≤ 16384, got " + std::to_string(a.depth);  // a block holds a row
  return "";
}

inline int64_t statistics_bytes(const Args& a) { return a.rows * 16; }

template <class T>
NormalizePrologue<T> prologue_of(const Args& a) {
  return {static_cast<const float*>(a.scratch), static_cast<const T*>(a.norm_weight),
          static_cast<const T*>(a.norm_bias), a.depth};
}

}  // namespace kf::KF_BACKEND::layer_norm_linear
