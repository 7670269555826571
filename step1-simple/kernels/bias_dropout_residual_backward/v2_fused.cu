// bias_dropout_residual_backward v2_fused: sum the gradient while it is in registers
//
// Idea      As bias_gelu_backward's v2: the kernel that writes the gradient of x also adds it up, before it is rounded.
//           A thread's eight elements begin at a multiple of eight, whatever the width: they are one Philox call.
// Since v1  values_at computes and stores. Eight columns a thread, whatever the width.
// Launch    grid (⌈width/256⌉, parts), block 32×8, 8.3 KB shared memory; then grid ⌈width/32⌉, block 32×32, 4 KB;
//           parts, and a tile more at odd widths: see include/step1/column_grid.h
// Moves     (2·rows·width + width)·sizeof(T) bytes, and about 2·parts·width·4 of partial sums;
//           2·rows·width FLOPs and 1/8 of a Philox call an element
// Limits    width ≤ 32·(2³¹−1)
#include <step1/column_sum.h>
#include <step1/philox.h>

#include "rungs.h"

namespace kf::KF_BACKEND::bias_dropout_residual_backward {
namespace {

template <bool kAligned, class T>
__global__ void __launch_bounds__(256, kDropoutBlocks<T>)
    v2_fused_kernel(const T* __restrict__ grad, T* __restrict__ grad_x, compute_t<T>* __restrict__ partial,
                    int64_t rows, int64_t width, int64_t rows_per_part, PhiloxState philox_state, uint32_t threshold,
                    compute_t<T> scale) {
  using C = compute_t<T>;
  philox_state.read();
  const int64_t begin = blockIdx.y * rows_per_part;
  sum_columns_by_eight(begin, min(begin + rows_per_part, rows), width, own_partial(partial),
                       [&](auto whole, int64_t i, int first, int last, C(&value)[8]) {
                         load_some<kAligned>(whole, grad + i, first, last, value);
                         if constexpr (sizeof(T) == 2) forget_round_keys(philox_state.seed);
                         const Eight eight = philox_state.eight(i / 8);
#pragma unroll
                         for (int j = 0; j < 8; ++j) {
                           value[j] = eight.number(j) >= threshold ? scale * value[j] : C(0);
                         }
                         store_some<kAligned>(whole, grad_x + i, first, last, value);
                       });
}

template <bool kAligned, class T>
void launch(const Args& a, void* stream) {
  const ColumnGrid g = column_grid_by_eight(a.rows, a.width, kDropoutWaves);
  const dim3 grid(static_cast<unsigned>(g.tiles), static_cast<unsigned>(g.parts));
  v2_fused_kernel<kAligned><<<grid, dim3(kTileLanes, kTileRows), 0, as_stream(stream)>>>(
      static_cast<const T*>(a.grad), static_cast<T*>(a.grad_x), static_cast<compute_t<T>*>(a.scratch), a.rows, a.width,
      g.rows_per_part, PhiloxState{a.rng_state, a.seed, a.offset}, a.threshold, keep_scale<compute_t<T>>(a.threshold));
  check_launch();
  finish_columns_by_eight<T>(a.scratch, a.grad_bias, g, a.width, stream);
}

}  // namespace

int64_t v2_fused_scratch_bytes(const Args& a) { return partial_sum_bytes(a.rows, a.width, a.dtype); }

void v2_fused(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    aligned_16(a.grad, a.grad_x) ? launch<true, T>(a, stream) : launch<false, T>(a, stream);
  });
}

}  // namespace kf::KF_BACKEND::bias_dropout_residual_backward
