// The second stage of grad_weight and grad_bias: adds up, column by column and in a fixed order, what the blocks of the
// first have left in partial[parts, 2·width], those of the weight first.
#pragma once

#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/column_sum.h>
#include <step2/dependent_launch.h>

namespace kf::KF_BACKEND::layer_norm_backward {

// kDependent: it is launched while the first stage runs, and waits for its end.
template <bool kDependent, class T, class C = compute_t<T>>
__global__ void finish_kernel(const C* __restrict__ partial, T* __restrict__ grad_weight, T* __restrict__ grad_bias,
                              int64_t parts, int64_t width) {
  if constexpr (kDependent) wait_on_dependent_grids();
  sum_columns<kFinishRows, C>(
      0, parts, 2 * width, [&](int64_t part, int64_t column) { return partial[part * 2 * width + column]; },
      [&](int64_t column, C total) {
        (column < width ? grad_weight[column] : grad_bias[column - width]) = from_compute<T>(total);
      });
}

// kDependent: the first stage calls launch_dependent_grids.
template <class T, bool kDependent = false>
void finish(const void* partial, void* grad_weight, void* grad_bias, int64_t parts, int64_t width, void* stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(2 * width, kTileLanes))), block(kTileLanes, kFinishRows);
  const auto* const from = static_cast<const compute_t<T>*>(partial);
  auto *const of_weight = static_cast<T*>(grad_weight), *const of_bias = static_cast<T*>(grad_bias);
  if constexpr (kDependent) {
    launch_dependent(finish_kernel<true, T>, grid, block, stream, from, of_weight, of_bias, parts, width);
  } else {
    finish_kernel<false><<<grid, block, 0, as_stream(stream)>>>(from, of_weight, of_bias, parts, width);
    check_launch();
  }
}

}  // namespace kf::KF_BACKEND::layer_norm_backward
