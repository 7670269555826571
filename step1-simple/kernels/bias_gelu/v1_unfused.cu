// bias_gelu v1_unfused: a launch for each operation
//
// Idea      How a library without fusion does it: the sum is written to memory, then GELU reads it and writes it back.
//           Each kernel is as good as a simple kernel can be, and half of what they move is needless.
// Launch    twice: grid ⌈rows·width/256⌉, block 256, no shared memory
// Moves     (4·rows·width + width)·sizeof(T) bytes (the bias is read again and again, but from cache);
//           about 10·rows·width FLOPs and one tanh or erfc an element
// Limits    rows·width ≤ 256·(2³¹−1); rounds x + bias
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/gelu.h>

#include "rungs.h"

namespace kf::KF_BACKEND::bias_gelu {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void add_bias_kernel(const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ y, int64_t n,
                                int64_t width) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) y[i] = from_compute<T>(to_compute(x[i]) + to_compute(bias[i % width]));
}

template <bool kTanh, class T>
__global__ void gelu_kernel(T* y, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) y[i] = from_compute<T>(gelu_of<kTanh>(to_compute(y[i])));
}

}  // namespace

void v1_unfused(const Args& a, void* stream) {
  const int64_t n = a.rows * a.width;
  const auto blocks = static_cast<unsigned>(ceil_div(n, kThreads));
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    T* y = static_cast<T*>(a.y);
    add_bias_kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(static_cast<const T*>(a.x),
                                                                static_cast<const T*>(a.bias), y, n, a.width);
    check_launch();
    const auto gelu = a.tanh ? gelu_kernel<true, T> : gelu_kernel<false, T>;
    gelu<<<blocks, kThreads, 0, as_stream(stream)>>>(y, n);
    check_launch();
  });
}

}  // namespace kf::KF_BACKEND::bias_gelu
