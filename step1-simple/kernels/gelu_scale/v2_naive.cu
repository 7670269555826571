// gelu_scale v2_naive: two operations, one trip through memory
//
// Idea      Fusion in its smallest form: gelu(x) stays in a register until it is multiplied. Half the bytes of v1, and
//           in half types one rounding less.
// Since v1  One kernel for two, and y is written once.
// Launch    grid ⌈n/256⌉, block 256, no shared memory
// Moves     2·n·sizeof(T) bytes; about 10·n FLOPs and one tanh or erfc an element
// Limits    n ≤ 256·(2³¹−1)
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/gelu.h>

#include "rungs.h"

namespace kf::KF_BACKEND::gelu_scale {
namespace {

constexpr int kThreads = 256;

template <bool kTanh, class T>
__global__ void v2_naive_kernel(const T* __restrict__ x, T* __restrict__ y, int64_t n, compute_t<T> factor) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) y[i] = from_compute<T>(factor * gelu_of<kTanh>(to_compute(x[i])));
}

}  // namespace

void v2_naive(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const auto blocks = static_cast<unsigned>(ceil_div(a.n, kThreads));
    const auto kernel = a.tanh ? v2_naive_kernel<true, T> : v2_naive_kernel<false, T>;
    kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(static_cast<const T*>(a.x), static_cast<T*>(a.y), a.n,
                                                       static_cast<compute_t<T>>(a.factor));
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::gelu_scale
