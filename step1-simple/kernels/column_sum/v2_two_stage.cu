// column_sum v2_two_stage: blocks share the rows, a second kernel adds their sums
//
// Idea      Enough threads to fill the GPU: the rows are cut into parts, a block for each part and each 32 columns. In
//           a block 8 threads, one below the other, share a column and meet in shared memory. What the blocks found is
//           written to `scratch`, since blocks cannot wait for each other, and a second launch adds it up. Both stages
//           add in a fixed order, so every run gives the same bits; atomic additions would not.
// Since v1  sum_columns of include/step1/column_sum.h in place of the loop, twice.
// Launch    grid (⌈width/32⌉, parts), block 32×8, 1 KB shared memory; then grid ⌈width/32⌉, block 32×32, 4 KB;
//           parts: see include/step1/column_grid.h
// Moves     (rows·width + width)·sizeof(T) bytes, and 2·parts·width·4 of partial sums; rows·width FLOPs
// Limits    width ≤ 32·(2³¹−1)
#include <step1/column_sum.h>

#include "rungs.h"

namespace kf::KF_BACKEND::column_sum {
namespace {

template <class T>
__global__ void v2_two_stage_kernel(const T* __restrict__ x, compute_t<T>* __restrict__ partial, int64_t rows,
                                    int64_t width, int64_t rows_per_part) {
  const int64_t begin = blockIdx.y * rows_per_part;
  sum_columns<kTileRows, compute_t<T>>(
      begin, min(begin + rows_per_part, rows), width,
      [&](int64_t row, int64_t column) { return to_compute(x[row * width + column]); },
      [&](int64_t column, compute_t<T> total) { partial[blockIdx.y * width + column] = total; });
}

}  // namespace

void v2_two_stage(const Args& a, void* stream) {
  const ColumnGrid g = column_grid_by_one(a.rows, a.width);
  const dim3 grid(static_cast<unsigned>(g.tiles), static_cast<unsigned>(g.parts));
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    v2_two_stage_kernel<<<grid, dim3(kTileLanes, kTileRows), 0, as_stream(stream)>>>(
        static_cast<const T*>(a.x), static_cast<compute_t<T>*>(a.scratch), a.rows, a.width, g.rows_per_part);
    check_launch();
    finish_columns<T>(a.scratch, a.sum, g.parts, a.width, stream);
  });
}

}  // namespace kf::KF_BACKEND::column_sum
