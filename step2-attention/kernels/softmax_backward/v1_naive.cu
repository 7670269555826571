// softmax_backward v1_naive: a thread a row
//
// Idea      The formula as two loops: the sum Σ y·g, which is one number for the whole row, and then the gradients.
//           As in softmax's v1, neighbouring threads read addresses a whole row apart.
// Launch    grid ⌈rows/128⌉, block 128, no shared memory
// Moves     5·rows·width·sizeof(T) bytes where no cache helps: grad and y twice, one write; 5·rows·width FLOPs
// Limits    rows ≤ 128·(2³¹−1)
#include <kf/launch.h>
#include <kf/numeric.h>

#include "row.h"
#include "rungs.h"

namespace kf::KF_BACKEND::softmax_backward {
namespace {

constexpr int kThreads = 128;

template <class T>
__global__ void v1_naive_kernel(const T* __restrict__ grad, const T* __restrict__ y, T* __restrict__ grad_x,
                                int64_t rows, int64_t width, int64_t q_length, compute_t<T> scale) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  grad += row * width;
  y += row * width;
  grad_x += row * width;

  const int64_t seen = columns_seen(row, width, q_length);  // all of them, where there is no mask

  compute_t<T> sum = 0;
  for (int64_t c = 0; c < seen; ++c) sum += to_compute(y[c]) * to_compute(grad[c]);

  for (int64_t c = 0; c < seen; ++c) {
    grad_x[c] = from_compute<T>(scale * (to_compute(y[c]) * (to_compute(grad[c]) - sum)));
  }
  for (int64_t c = seen; c < width; ++c) grad_x[c] = from_compute<T>(0);
}

}  // namespace

void v1_naive(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const auto blocks = static_cast<unsigned>(ceil_div(a.rows, kThreads));
    v1_naive_kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(
        static_cast<const T*>(a.grad), static_cast<const T*>(a.y), static_cast<T*>(a.grad_x), a.rows, a.width,
        mask_of(a), static_cast<compute_t<T>>(a.scale));
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::softmax_backward
