// embedding_backward v2_windows: long segments in windows of 64 tokens
//
// Idea      The sorted tokens are cut into windows of 64, wherever segments begin. A window that lies in one segment is
//           added up for itself, all windows side by side. A row then adds the sums of the windows that it has as a
//           whole, and one by one only the tokens before the first and behind the last: at most 63 each.
// Since v1  A segment of 16384 tokens is 256 sums that 256 rows of threads make at once, and 256 additions. A segment
//           without a whole window is added as before. The order depends on the ids alone, so the bits are the same in
//           every run; they are not v1's.
// Launch    grid b·⌈⌊n/64⌋/y⌉, then b·⌈vocab/y⌉, block (x, y), no shared memory; N, b, x and y as in v1; ⌊n/64⌋·width
//           sums in float32 (float64 for float64) between the two
// Moves     (n + vocab)·width·sizeof(T) + 12·n + 8·vocab bytes, and of the windows that lie in one segment the sums
// twice;
//           n·width FLOPs
// Limits    b·⌈vocab/y⌉ ≤ 2³¹−1
#include "sum.h"

namespace kf::KF_BACKEND::embedding_backward {
namespace {

constexpr int64_t kWindow = 64;

template <int N, class T>
__global__ void __launch_bounds__(kThreads)
    v2_windows_sums(const Args a, const T* __restrict__ grad, compute_t<T>* __restrict__ sums, unsigned blocks_a_row) {
  const int64_t window = row_of(blocks_a_row);
  const int64_t column = column_of(blocks_a_row, N);
  const int64_t begin = window * kWindow, end = begin + kWindow;
  if (end > a.n || column >= a.width) return;
  if (a.sorted[begin] != a.sorted[end - 1]) return;  // of several segments: nobody takes its sum
  compute_t<T> sum[N] = {};
  add_rows<N>(begin, end, [&](int64_t i) { return grad + a.order[i] * a.width + column; }, sum);
  store_vector<N>(sums + window * a.width + column, narrow<compute_t<T>>(sum));
}

template <int N, class T>
__global__ void __launch_bounds__(kThreads)
    v2_windows_kernel(const Args a, const T* __restrict__ grad, const compute_t<T>* __restrict__ sums,
                      T* __restrict__ y, unsigned blocks_a_row) {
  const int64_t row = row_of(blocks_a_row);
  const int64_t column = column_of(blocks_a_row, N);
  if (row >= a.vocab || column >= a.width) return;
  const int64_t begin = a.first[row], end = a.first[row + 1];
  const int64_t first_window = ceil_div(begin, kWindow), last_window = end / kWindow;
  const bool whole = first_window < last_window;
  const auto token = [&](int64_t i) { return grad + a.order[i] * a.width + column; };
  compute_t<T> sum[N] = {};
  add_rows<N>(begin, whole ? first_window * kWindow : end, token, sum);
  if (whole) {
    add_rows<N>(first_window, last_window, [&](int64_t w) { return sums + w * a.width + column; }, sum);
    add_rows<N>(last_window * kWindow, end, token, sum);
  }
  store_vector_streaming<N>(y + row * a.width + column, narrow<T>(sum));
}

}  // namespace

int64_t v2_windows_scratch_bytes(const Args& a) {
  return a.n / kWindow * a.width * (a.dtype == DType::kFloat64 ? 8 : 4);
}

void v2_windows(const Args& a, void* stream) {
  with_columns(a, [&](auto type, auto columns) {
    using T = typename decltype(type)::element;
    constexpr int N = decltype(columns)::value;
    const Shape shape = shape_for(a.width, N);
    const auto blocks_a_row = static_cast<unsigned>(shape.blocks_a_row);
    auto* sums = static_cast<compute_t<T>*>(a.scratch);
    const T* grad = static_cast<const T*>(a.grad);
    if (a.n >= kWindow) {
      v2_windows_sums<N>
          <<<shape.grid(a.n / kWindow), shape.block(), 0, as_stream(stream)>>>(a, grad, sums, blocks_a_row);
      check_launch();
    }
    v2_windows_kernel<N><<<shape.grid(a.vocab), shape.block(), 0, as_stream(stream)>>>(
        a, grad, sums, static_cast<T*>(a.y), blocks_a_row);
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::embedding_backward
