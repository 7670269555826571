// column_sum v1_serial: a thread a column
//
// Idea      Each thread goes down its column. Neighbours read neighbouring columns, so every access is coalesced, and
//           still this is slow: GPT-2's widths give a few hundred or thousand threads where a GPU holds hundreds of
//           thousands, and each of them waits for memory row after row.
// Launch    grid ⌈width/256⌉, block 256, no shared memory
// Moves     (rows·width + width)·sizeof(T) bytes, rows·width FLOPs
// Limits    width ≤ 256·(2³¹−1)
#include <kf/launch.h>
#include <kf/numeric.h>

#include "rungs.h"

namespace kf::KF_BACKEND::column_sum {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void v1_serial_kernel(const T* __restrict__ x, T* __restrict__ sum, int64_t rows, int64_t width) {
  const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (column >= width) return;
  compute_t<T> total = 0;
  for (int64_t row = 0; row < rows; ++row) total += to_compute(x[row * width + column]);
  sum[column] = from_compute<T>(total);
}

}  // namespace

void v1_serial(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const auto blocks = static_cast<unsigned>(ceil_div(a.width, kThreads));
    v1_serial_kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(static_cast<const T*>(a.x), static_cast<T*>(a.sum),
                                                                 a.rows, a.width);
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::column_sum
