// embedding_backward v1_segments: a row of the table adds up its own tokens
//
// Idea      Turned round: not "each token adds its gradient to a row", for which rows would need atomics, but "each row
//           fetches the gradients of its tokens". Nobody else writes that row, so it is written once, in the table's
//           dtype, from a sum in registers, 0 where there is no token. Tokens come sorted by id, so a row's are a
//           segment of `order`.
// Slow      A segment is added by one thread for each N columns, however long it is. One token that fills the text is
//           one segment, and all but one row of threads have nothing to do.
// Launch    grid b·⌈vocab/y⌉, block (x, y), no shared memory; N = 16/sizeof(T), or 1 where rows do not begin at
//           multiples of 16 bytes; b = ⌈width/N/256⌉ blocks a row, x = ⌈width/N/b⌉, y = ⌊256/x⌋
// Moves     (n + vocab)·width·sizeof(T) + 8·n + 8·vocab bytes; n·width FLOPs
// Limits    b·⌈vocab/y⌉ ≤ 2³¹−1
#include "sum.h"

namespace kf::KF_BACKEND::embedding_backward {
namespace {

template <int N, class T>
__global__ void __launch_bounds__(kThreads)
    v1_segments_kernel(const Args a, const T* __restrict__ grad, T* __restrict__ y, unsigned blocks_a_row) {
  const int64_t row = row_of(blocks_a_row);
  const int64_t column = column_of(blocks_a_row, N);
  if (row >= a.vocab || column >= a.width) return;
  compute_t<T> sum[N] = {};
  add_rows<N>(a.first[row], a.first[row + 1], [&](int64_t i) { return grad + a.order[i] * a.width + column; }, sum);
  store_vector_streaming<N>(y + row * a.width + column, narrow<T>(sum));
}

}  // namespace

void v1_segments(const Args& a, void* stream) {
  with_columns(a, [&](auto type, auto columns) {
    using T = typename decltype(type)::element;
    constexpr int N = decltype(columns)::value;
    const Shape shape = shape_for(a.width, N);
    v1_segments_kernel<N><<<shape.grid(a.vocab), shape.block(), 0, as_stream(stream)>>>(
        a, static_cast<const T*>(a.grad), static_cast<T*>(a.y), static_cast<unsigned>(shape.blocks_a_row));
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::embedding_backward
