// A gradient that is changed element by element, and the sums of its columns on the way, as step 1's
// bias_gelu_backward has it: what is written is never read back, and sums are of what is not yet rounded.
#pragma once

#include <step1/column_sum.h>

namespace kf::KF_BACKEND {

// change.begin() comes first. change.apply<kAligned>(whole, i, first, last, value) changes `value`, eight elements of
// the gradient from element i on, of which those from `first` to `last` count: see load_some in step1/vector.h.
// Change::kBlocks: how many blocks a multiprocessor shall have registers for; kWaves: see column_grid in step 1's
// include/step1/column_grid.h.
template <bool kAligned, class T, class Change>
__global__ void __launch_bounds__(kTileLanes* kTileRows, Change::kBlocks)
    summed_gradient_kernel(const T* __restrict__ grad, T* __restrict__ out, compute_t<T>* __restrict__ partial,
                           int64_t rows, int64_t width, int64_t rows_per_part, Change change) {
  using C = compute_t<T>;
  change.begin();
  const int64_t begin = blockIdx.y * rows_per_part;
  sum_columns_by_eight(begin, min(begin + rows_per_part, rows), width, own_partial(partial),
                       [&](auto whole, int64_t i, int first, int last, C(&value)[8]) {
                         load_some<kAligned>(whole, grad + i, first, last, value);
                         change.template apply<kAligned>(whole, i, first, last, value);
                         store_some<kAligned>(whole, out + i, first, last, value);
                       });
}

// out = the changed gradient, sums = the sums of its columns. scratch: step 1's partial_sum_bytes. aligned: whatever is
// read and written begins at multiples of 16 bytes.
template <class T, class Change>
void launch_summed_gradient(const void* grad, void* out, void* sums, void* scratch, int64_t rows, int64_t width,
                            bool aligned, const Change& change, void* stream) {
  const ColumnGrid g = column_grid_by_eight(rows, width, Change::kWaves);
  const dim3 grid(static_cast<unsigned>(g.tiles), static_cast<unsigned>(g.parts));
  const auto kernel = aligned ? summed_gradient_kernel<true, T, Change> : summed_gradient_kernel<false, T, Change>;
  kernel<<<grid, dim3(kTileLanes, kTileRows), 0, as_stream(stream)>>>(static_cast<const T*>(grad), static_cast<T*>(out),
                                                                      static_cast<compute_t<T>*>(scratch), rows, width,
                                                                      g.rows_per_part, change);
  check_launch();
  finish_columns_by_eight<T>(scratch, sums, g, width, stream);
}

}  // namespace kf::KF_BACKEND
