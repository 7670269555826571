// column_sum v2_two_stage: blocks share the rows, a second kernel adds their sums
//
// Idea      Enough threads to fill the GPU: the rows are cut into parts, a block for each part and each 32 columns. In
//           a block 8 threads, one below the other, share a column and meet in shared memory. What the blocks found is
//           written to `scratch`, since blocks cannot wait for each other, and a second launch adds it up. Both stages
//           add in a fixed order, so every run gives the same bits; atomic additions would not.
// Since v1  sum_rows of include/step1/column_sum.h, where the kernels stand: sum_columns in place of the loop, twice.
// Launch    grid (⌈width/32⌉, parts), block 32×8, 1 KB shared memory; then grid ⌈width/32⌉, block 32×32, 4 KB;
//           parts: see include/step1/column_grid.h
// Moves     (rows·width + width)·sizeof(T) bytes, and 2·parts·width·4 of partial sums; rows·width FLOPs
// Limits    width ≤ 32·(2³¹−1)
#include <step1/column_sum.h>

#include "rungs.h"

namespace kf::KF_BACKEND::column_sum {

int64_t v2_two_stage_scratch_bytes(const Args& a) { return partial_sum_bytes(a.rows, a.width, a.dtype); }

void v2_two_stage(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    sum_rows(static_cast<const T*>(a.x), a.scratch, a.sum, a.rows, a.width, stream);
  });
}

}  // namespace kf::KF_BACKEND::column_sum
