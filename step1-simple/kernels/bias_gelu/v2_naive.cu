// bias_gelu v2_naive: two operations, one trip through memory
//
// Idea      Fusion: the sum stays in a register. Half the bytes of v1, and in half types one rounding less. Thread i
//           still owns element i; its column is i mod width.
// Since v1  One kernel for two, and y is written once.
// Launch    grid ⌈rows·width/256⌉, block 256, no shared memory
// Moves     (2·rows·width + width)·sizeof(T) bytes (the bias is read again and again, but from cache);
//           about 10·rows·width FLOPs and one tanh or erfc an element
// Limits    rows·width ≤ 256·(2³¹−1)
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/gelu.h>

#include "rungs.h"

namespace kf::KF_BACKEND::bias_gelu {
namespace {

constexpr int kThreads = 256;

template <bool kTanh, class T>
__global__ void v2_naive_kernel(const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ y, int64_t n,
                                int64_t width) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const auto sum = to_compute(x[i]) + to_compute(bias[i % width]);
  y[i] = from_compute<T>(gelu_of<kTanh>(sum));
}

}  // namespace

void v2_naive(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const int64_t n = a.rows * a.width;
    const auto blocks = static_cast<unsigned>(ceil_div(n, kThreads));
    const auto kernel = a.tanh ? v2_naive_kernel<true, T> : v2_naive_kernel<false, T>;
    kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(static_cast<const T*>(a.x), static_cast<const T*>(a.bias),
                                                       static_cast<T*>(a.y), n, a.width);
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::bias_gelu
