// bias_gelu v4_exp: fewer instructions for the same number
//
// Idea      In half types v3 is bound by instructions, not by memory: tanhf is most of them. As in gelu's v3,
//           (1 + tanh u)/2 is written as 1/(1 + exp(−2u)), two instructions of the special-function unit.
// Since v3  fast_gelu in place of gelu_of; see include/step1/gelu.h.
// Launch    grid ⌈rows·width/N/256⌉, block 256, no shared memory; N = 16/sizeof(T)
// Moves     (2·rows·width + width)·sizeof(T) bytes; about 10·rows·width FLOPs and one exp and one reciprocal an element
// Limits    rows·width ≤ 256·N·(2³¹−1)
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/gelu.h>
#include <step1/vector.h>

#include "rungs.h"

namespace kf::KF_BACKEND::bias_gelu {
namespace {

constexpr int kThreads = 256;

template <bool kTanh, int N, class T>
__global__ void v4_exp_kernel(const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ y, int64_t n,
                              int64_t width) {
  const int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N;
  if (i >= n) return;
  compute_t<T> value[N], b[N];
  widen(load_vector<N>(x + i), value);
  widen(load_vector<N>(bias + i % width), b);
#pragma unroll
  for (int j = 0; j < N; ++j) value[j] = fast_gelu<T, kTanh>(value[j] + b[j]);
  store_vector<N>(y + i, narrow<T>(value));
}

template <int N, class T>
void launch(const Args& a, void* stream) {
  const int64_t n = a.rows * a.width;
  const auto blocks = static_cast<unsigned>(ceil_div(n / N, kThreads));
  const auto kernel = a.tanh ? v4_exp_kernel<true, N, T> : v4_exp_kernel<false, N, T>;
  kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(static_cast<const T*>(a.x), static_cast<const T*>(a.bias),
                                                     static_cast<T*>(a.y), n, a.width);
}

}  // namespace

void v4_exp(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    constexpr int kVector = 16 / sizeof(T);
    a.width % kVector == 0 && aligned_16(a.x, a.bias, a.y) ? launch<kVector, T>(a, stream) : launch<1, T>(a, stream);
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::bias_gelu
