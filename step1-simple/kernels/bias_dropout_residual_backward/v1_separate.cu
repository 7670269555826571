// bias_dropout_residual_backward v1_separate: the mask again, and then the sum
//
// Idea      The forward stored no mask. The same seed, offset and element number give the same bits, so this kernel
//           makes the mask again. The gradient of the bias is the sum over the rows of what it wrote. The gradient of
//           the residual is `grad` itself: nothing to do.
// Launch    grid ⌈rows·width/256⌉, block 256; then column_sum's v2: grid (⌈width/32⌉, parts), block 32×8;
//           then grid ⌈width/32⌉, block 32×32
// Moves     (3·rows·width + width)·sizeof(T) bytes, and 2·parts·width·4 of partial sums;
//           2·rows·width FLOPs and a Philox call an element
// Limits    rows·width ≤ 256·(2³¹−1); rounds grad_x before it is summed
#include <step1/column_sum.h>
#include <step1/philox.h>

#include "rungs.h"

namespace kf::KF_BACKEND::bias_dropout_residual_backward {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void grad_x_kernel(const T* __restrict__ grad, T* __restrict__ grad_x, int64_t n, PhiloxState philox_state,
                              uint32_t threshold, compute_t<T> scale) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= n) return;
  philox_state.read();
  const bool keep = philox_state.eight(i / 8).number(static_cast<int>(i % 8)) >= threshold;
  grad_x[i] = from_compute<T>(keep ? scale * to_compute(grad[i]) : compute_t<T>(0));
}

}  // namespace

int64_t v1_separate_scratch_bytes(const Args& a) { return partial_sum_bytes(a.rows, a.width, a.dtype); }

void v1_separate(const Args& a, void* stream) {
  const int64_t n = a.rows * a.width;
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    T* grad_x = static_cast<T*>(a.grad_x);
    grad_x_kernel<<<static_cast<unsigned>(ceil_div(n, kThreads)), kThreads, 0, as_stream(stream)>>>(
        static_cast<const T*>(a.grad), grad_x, n, PhiloxState{a.rng_state, a.seed, a.offset}, a.threshold,
        keep_scale<compute_t<T>>(a.threshold));
    check_launch();

    sum_rows(grad_x, a.scratch, a.grad_bias, a.rows, a.width, stream);
  });
}

}  // namespace kf::KF_BACKEND::bias_dropout_residual_backward
