// gelu_scale v1_unfused: a launch for each operation
//
// Idea      How a library without fusion does it: gelu writes its result to memory, then scale reads it, multiplies and
//           writes it back. Each kernel is as good as a simple kernel can be, and half of what they move is needless.
// Launch    twice: grid ⌈n/256⌉, block 256, no shared memory
// Moves     4·n·sizeof(T) bytes; about 10·n FLOPs and one tanh or erfc an element
// Limits    n ≤ 256·(2³¹−1); rounds gelu(x)
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/gelu.h>

#include "rungs.h"

namespace kf::KF_BACKEND::gelu_scale {
namespace {

constexpr int kThreads = 256;

template <bool kTanh, class T>
__global__ void gelu_kernel(const T* __restrict__ x, T* __restrict__ y, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) y[i] = from_compute<T>(gelu_of<kTanh>(to_compute(x[i])));
}

template <class T>
__global__ void scale_kernel(T* y, int64_t n, compute_t<T> factor) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) y[i] = from_compute<T>(factor * to_compute(y[i]));
}

}  // namespace

void v1_unfused(const Args& a, void* stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(a.n, kThreads));
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const T* x = static_cast<const T*>(a.x);
    T* y = static_cast<T*>(a.y);
    const auto gelu = a.tanh ? gelu_kernel<true, T> : gelu_kernel<false, T>;
    gelu<<<blocks, kThreads, 0, as_stream(stream)>>>(x, y, a.n);
    check_launch();
    scale_kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(y, a.n, static_cast<compute_t<T>>(a.factor));
    check_launch();
  });
}

}  // namespace kf::KF_BACKEND::gelu_scale
