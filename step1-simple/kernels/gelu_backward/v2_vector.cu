// gelu_backward v2_vector: 16 bytes a thread, and the gate for tanh
//
// Idea      As gelu's v2 and v3. With the gate s = 1/(1 + exp(−2u)) the derivative is s + s·(1 − s)·x·2u′: again one
//           exponential and one reciprocal.
// Since v1  A thread owns N neighbours; the n mod N elements left over go one each to the first threads. Where a
//           pointer does not start at a multiple of 16 bytes, N is 1. fast_gelu_slope in place of gelu_slope.
// Launch    grid ⌈⌈n/N⌉/256⌉, block 256, no shared memory; N = 16/sizeof(T)
// Moves     3·n·sizeof(T) bytes; about 15·n FLOPs, one exp and one reciprocal an element
// Limits    n ≤ 256·N·(2³¹−1)
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/gelu.h>
#include <step1/vector.h>

#include "rungs.h"

namespace kf::KF_BACKEND::gelu_backward {
namespace {

constexpr int kThreads = 256;

template <bool kTanh, int N, class T>
__global__ void v2_vector_kernel(const T* __restrict__ grad, const T* __restrict__ x, T* __restrict__ grad_x, int64_t n,
                                 compute_t<T> factor) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t vectors = n / N;
  if (i < vectors) {
    compute_t<T> g[N], value[N];
    widen(load_vector<N>(grad + i * N), g);
    widen(load_vector<N>(x + i * N), value);
#pragma unroll
    for (int j = 0; j < N; ++j) value[j] = factor * g[j] * fast_gelu_slope<T, kTanh>(value[j]);
    store_vector<N>(grad_x + i * N, narrow<T>(value));
  }
  const int64_t tail = vectors * N + i;
  if (tail < n) {
    grad_x[tail] = from_compute<T>(factor * to_compute(grad[tail]) * fast_gelu_slope<T, kTanh>(to_compute(x[tail])));
  }
}

template <int N, class T>
void launch(const Args& a, void* stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(ceil_div(a.n, N), kThreads));
  const auto kernel = a.tanh ? v2_vector_kernel<true, N, T> : v2_vector_kernel<false, N, T>;
  kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(static_cast<const T*>(a.grad), static_cast<const T*>(a.x),
                                                     static_cast<T*>(a.grad_x), a.n,
                                                     static_cast<compute_t<T>>(a.factor));
}

}  // namespace

void v2_vector(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    aligned_16(a.grad, a.x, a.grad_x) ? launch<16 / sizeof(T), T>(a, stream) : launch<1, T>(a, stream);
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::gelu_backward
