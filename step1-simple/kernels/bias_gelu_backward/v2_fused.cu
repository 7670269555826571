// bias_gelu_backward v2_fused: sum the gradient while it is in registers
//
// Idea      The kernel that computes the gradient of x walks down the rows as column_sum's v3 does, and adds up what it
//           writes. So nothing is read back; and in half types the sum is of values that are not yet rounded. A thread
//           meets the same columns in every row: it reads their bias once.
// Since v1  values_at computes and stores. Eight columns a thread, whatever the width. fast_gelu_slope in place of
//           gelu_slope.
// Launch    grid (⌈width/256⌉, parts), block 32×8, 8.3 KB shared memory; then grid ⌈width/32⌉, block 32×32, 4 KB;
//           parts, and a tile more at odd widths: see include/step1/column_grid.h
// Moves     (3·rows·width + 2·width)·sizeof(T) bytes, and about 2·parts·width·4 of partial sums;
//           about 17·rows·width FLOPs, one exp and one reciprocal an element
// Limits    width ≤ 32·(2³¹−1)
#include <step1/column_sum.h>
#include <step1/gelu.h>

#include "rungs.h"

namespace kf::KF_BACKEND::bias_gelu_backward {
namespace {

constexpr int kWaves = 1;  // four blocks fit on a multiprocessor, and twice as many are launched

template <bool kTanh, bool kAligned, class T>
__global__ void v2_fused_kernel(const T* __restrict__ grad, const T* __restrict__ x, const T* __restrict__ bias,
                                T* __restrict__ grad_x, compute_t<T>* __restrict__ partial, int64_t rows, int64_t width,
                                int64_t rows_per_part) {
  using C = compute_t<T>;
  const int64_t begin = blockIdx.y * rows_per_part;
  const int64_t column = first_of_eight(begin, width);
  C b[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    b[j] = column + j >= 0 && column + j < width ? to_compute(bias[column + j]) : C(0);
  }
  sum_columns_by_eight(begin, min(begin + rows_per_part, rows), width, own_partial(partial),
                       [&](auto whole, int64_t i, int first, int last, C(&value)[8]) {
                         C g[8];
                         load_some<kAligned>(whole, grad + i, first, last, g);
                         load_some<kAligned>(whole, x + i, first, last, value);
#pragma unroll
                         for (int j = 0; j < 8; ++j) value[j] = g[j] * fast_gelu_slope<T, kTanh>(value[j] + b[j]);
                         store_some<kAligned>(whole, grad_x + i, first, last, value);
                       });
}

template <bool kAligned, class T>
void launch(const Args& a, void* stream) {
  const ColumnGrid g = column_grid_by_eight(a.rows, a.width, kWaves);
  const dim3 grid(static_cast<unsigned>(g.tiles), static_cast<unsigned>(g.parts));
  const auto kernel = a.tanh ? v2_fused_kernel<true, kAligned, T> : v2_fused_kernel<false, kAligned, T>;
  kernel<<<grid, dim3(kTileLanes, kTileRows), 0, as_stream(stream)>>>(
      static_cast<const T*>(a.grad), static_cast<const T*>(a.x), static_cast<const T*>(a.bias),
      static_cast<T*>(a.grad_x), static_cast<compute_t<T>*>(a.scratch), a.rows, a.width, g.rows_per_part);
  check_launch();
  finish_columns_by_eight<T>(a.scratch, a.grad_bias, g, a.width, stream);
}

}  // namespace

int64_t v2_fused_scratch_bytes(const Args& a) { return partial_sum_bytes(a.rows, a.width, a.dtype); }

void v2_fused(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    aligned_16(a.grad, a.x, a.grad_x) ? launch<true, T>(a, stream) : launch<false, T>(a, stream);
  });
}

}  // namespace kf::KF_BACKEND::bias_gelu_backward
