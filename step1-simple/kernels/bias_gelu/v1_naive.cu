// bias_gelu v1_naive: two operations, one trip through memory
//
// Idea      Separately, the bias add writes its sum and GELU reads it back. Here the sum stays in a register:
//           fusion in its smallest form. Thread i still owns element i; its column is i mod width.
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
__global__ void v1_naive_kernel(const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ y, int64_t n,
                                int64_t width) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const auto sum = to_compute(x[i]) + to_compute(bias[i % width]);
  y[i] = from_compute<T>(kTanh ? gelu_tanh(sum) : gelu_erf(sum));
}

template <bool kTanh, class T>
void launch(const Args& a, void* stream) {
  const int64_t n = a.rows * a.width;
  const auto blocks = static_cast<unsigned>(ceil_div(n, kThreads));
  v1_naive_kernel<kTanh><<<blocks, kThreads, 0, as_stream(stream)>>>(
      static_cast<const T*>(a.x), static_cast<const T*>(a.bias), static_cast<T*>(a.y), n, a.width);
}

}  // namespace

void v1_naive(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    a.tanh ? launch<true, T>(a, stream) : launch<false, T>(a, stream);
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::bias_gelu
