// gelu v1_naive: a thread an element, the formula as it stands
//
// Idea      scale's v2 with another function. It moves the same bytes, and does twenty times the arithmetic: tanhf and
//           erfcf are subroutines of some twenty to forty instructions.
// Launch    grid ⌈n/256⌉, block 256, no shared memory
// Moves     2·n·sizeof(T) bytes; about 9·n FLOPs and one tanh or erfc an element
// Limits    n ≤ 256·(2³¹−1)
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/gelu.h>

#include "rungs.h"

namespace kf::KF_BACKEND::gelu {
namespace {

constexpr int kThreads = 256;

template <bool kTanh, class T>
__global__ void v1_naive_kernel(const T* __restrict__ x, T* __restrict__ y, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) y[i] = from_compute<T>(gelu_of<kTanh>(to_compute(x[i])));
}

}  // namespace

void v1_naive(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const auto blocks = static_cast<unsigned>(ceil_div(a.n, kThreads));
    const auto kernel = a.tanh ? v1_naive_kernel<true, T> : v1_naive_kernel<false, T>;
    kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(static_cast<const T*>(a.x), static_cast<T*>(a.y), a.n);
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::gelu
