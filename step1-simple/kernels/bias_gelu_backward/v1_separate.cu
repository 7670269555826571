// bias_gelu_backward v1_separate: the gradient of x, and then its sum
//
// Idea      One kernel writes the gradient of x, a thread an element. The gradient of the bias is the sum of that over
//           the rows, so column_sum's two kernels read it back.
// Launch    grid ⌈rows·width/256⌉, block 256; then column_sum's v2: grid (⌈width/32⌉, parts), block 32×8;
//           then grid ⌈width/32⌉, block 32×32
// Moves     (4·rows·width + 2·width)·sizeof(T) bytes, and 2·parts·width·4 of partial sums;
//           about 17·rows·width FLOPs and one tanh, or an erfc and an exp, an element
// Limits    rows·width ≤ 256·(2³¹−1); rounds grad_x before it is summed
#include <step1/column_sum.h>
#include <step1/gelu.h>

#include "rungs.h"

namespace kf::KF_BACKEND::bias_gelu_backward {
namespace {

constexpr int kThreads = 256;

template <bool kTanh, class T>
__global__ void grad_x_kernel(const T* __restrict__ grad, const T* __restrict__ x, const T* __restrict__ bias,
                              T* __restrict__ grad_x, int64_t n, int64_t width) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const auto sum = to_compute(x[i]) + to_compute(bias[i % width]);
  grad_x[i] = from_compute<T>(to_compute(grad[i]) * gelu_slope<kTanh>(sum));
}

}  // namespace

int64_t v1_separate_scratch_bytes(const Args& a) { return partial_sum_bytes(a.rows, a.width, a.dtype); }

void v1_separate(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const int64_t n = a.rows * a.width;
    const auto blocks = static_cast<unsigned>(ceil_div(n, kThreads));
    T* grad_x = static_cast<T*>(a.grad_x);
    const auto kernel = a.tanh ? grad_x_kernel<true, T> : grad_x_kernel<false, T>;
    kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(static_cast<const T*>(a.grad), static_cast<const T*>(a.x),
                                                       static_cast<const T*>(a.bias), grad_x, n, a.width);
    check_launch();
    sum_rows(grad_x, a.scratch, a.grad_bias, a.rows, a.width, stream);
  });
}

}  // namespace kf::KF_BACKEND::bias_gelu_backward
