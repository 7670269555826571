// column_sum v3_vector: eight columns a thread, whatever the width
//
// Idea      128-bit loads, as always; a warp now covers 256 columns of a row. Where the width is odd, rows do not start
//           at multiples of 16 bytes, but every eighth row does so in the same way: a thread that takes every eighth
//           row can load groups that lie askew, and still keep the same columns.
// Since v2  sum_columns_by_eight of include/step1/column_sum.h in the first stage, and its own second stage.
// Launch    grid (⌈width/256⌉, parts), block 32×8, 8.3 KB shared memory; then grid ⌈width/32⌉, block 32×32, 4 KB;
//           parts, and a tile more at odd widths: see include/step1/column_grid.h
// Moves     (rows·width + width)·sizeof(T) bytes, and about 2·parts·width·4 of partial sums; rows·width FLOPs
// Limits    width ≤ 32·(2³¹−1)
#include <step1/column_sum.h>

#include "rungs.h"

namespace kf::KF_BACKEND::column_sum {
namespace {

constexpr int kWaves = 1;  // eight blocks fit on a multiprocessor

template <bool kAligned, class T>
__global__ void v3_vector_kernel(const T* __restrict__ x, compute_t<T>* __restrict__ partial, int64_t rows,
                                 int64_t width, int64_t rows_per_part) {
  using C = compute_t<T>;
  const int64_t begin = blockIdx.y * rows_per_part;
  sum_columns_by_eight(begin, min(begin + rows_per_part, rows), width, own_partial(partial),
                       [&](auto whole, int64_t i, int first, int last, C(&value)[8]) {
                         load_some<kAligned>(whole, x + i, first, last, value);
                       });
}

template <bool kAligned, class T>
void launch(const Args& a, void* stream) {
  const ColumnGrid g = column_grid_by_eight(a.rows, a.width, kWaves);
  const dim3 grid(static_cast<unsigned>(g.tiles), static_cast<unsigned>(g.parts));
  v3_vector_kernel<kAligned><<<grid, dim3(kTileLanes, kTileRows), 0, as_stream(stream)>>>(
      static_cast<const T*>(a.x), static_cast<compute_t<T>*>(a.scratch), a.rows, a.width, g.rows_per_part);
  check_launch();
  finish_columns_by_eight<T>(a.scratch, a.sum, g, a.width, stream);
}

}  // namespace

int64_t v3_vector_scratch_bytes(const Args& a) { return partial_sum_bytes(a.rows, a.width, a.dtype); }

void v3_vector(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    aligned_16(a.x) ? launch<true, T>(a, stream) : launch<false, T>(a, stream);
  });
}

}  // namespace kf::KF_BACKEND::column_sum
