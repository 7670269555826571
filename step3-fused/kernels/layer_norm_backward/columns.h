// The second stage of grad_weight and grad_bias: adds up, column by column and in a fixed order, what the blocks of the
// first have left in partial[parts, 2·width], those of the weight first.
#pragma once

#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/column_sum.h>
#include <step2/dependent_launch.h>

namespace kf::KF_BACKEND::layer_norm_backward {

template <class T, class C = compute_t<T>>
__global__ void finish_kernel(const C* __restrict__ partial, T* __restrict__ grad_weight, T* __restrict__ grad_bias,
                              int64_t parts, int64_t width) {
  wait_on_dependent_grids();  // on the first stage, which may run still
  sum_columns<kFinishRows, C>(
      0, parts, 2 * width, [&](int64_t part, int64_t column) { return partial[part * 2 * width + column]; },
      [&](int64_t column, C total) {
        (column < width ? grad_weight[column] : grad_bias[column - width]) = from_compute<T>(total);
      });
}

// dependent: the first stage calls launch_dependent_grids.
template <class T>
void finish(const void* partial, void* grad_weight, void* grad_bias, int64_t parts, int64_t width, void* stream,
            bool dependent = false) {
  const dim3 grid(static_cast<unsigned>(ceil_div(2 * width, kTileLanes))), block(kTileLanes, kFinishRows);
  launch_dependent_if(dependent, finish_kernel<T>, grid, block, 0, stream, static_cast<const compute_t<T>*>(partial),
                      static_cast<T*>(grad_weight), static_cast<T*>(grad_bias), parts, width);
}

}  // namespace kf::KF_BACKEND::layer_norm_backward
