// gelu_backward v1_naive: a thread an element, the formula as it stands
//
// Idea      The derivative needs x, not gelu(x), so x is what the forward keeps. Everything is computed anew from it:
//           that costs arithmetic, which is there in plenty, and no memory.
// Launch    grid ⌈n/256⌉, block 256, no shared memory
// Moves     3·n·sizeof(T) bytes; about 16·n FLOPs and one tanh, or an erfc and an exp, an element
// Limits    n ≤ 256·(2³¹−1)
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/gelu.h>

#include "rungs.h"

namespace kf::KF_BACKEND::gelu_backward {
namespace {

constexpr int kThreads = 256;

template <bool kTanh, class T>
__global__ void v1_naive_kernel(const T* __restrict__ grad, const T* __restrict__ x, T* __restrict__ grad_x, int64_t n,
                                compute_t<T> factor) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) grad_x[i] = from_compute<T>(factor * to_compute(grad[i]) * gelu_slope<kTanh>(to_compute(x[i])));
}

}  // namespace

void v1_naive(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const auto blocks = static_cast<unsigned>(ceil_div(a.n, kThreads));
    const auto kernel = a.tanh ? v1_naive_kernel<true, T> : v1_naive_kernel<false, T>;
    kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(static_cast<const T*>(a.grad), static_cast<const T*>(a.x),
                                                       static_cast<T*>(a.grad_x), a.n,
                                                       static_cast<compute_t<T>>(a.factor));
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::gelu_backward
