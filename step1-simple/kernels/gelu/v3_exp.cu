// gelu v3_exp: fewer instructions for the same number
//
// Idea      Once memory is no longer the bound, instructions are. (1 + tanh u)/2 is 1/(1 + exp(−2u)): one exponential
//           and one reciprocal, each a single instruction of the special-function unit, instead of tanhf's twenty and a
//           branch. The exact GELU has its own polynomial in half types. Both are as exact as T can show.
// Since v2  fast_gelu in place of gelu_of; see include/step1/gelu.h.
// Launch    grid ⌈⌈n/N⌉/256⌉, block 256, no shared memory; N = 16/sizeof(T)
// Moves     2·n·sizeof(T) bytes; about 7·n FLOPs, one exp and one reciprocal an element
// Limits    n ≤ 256·N·(2³¹−1)
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/gelu.h>
#include <step1/vector.h>

#include "rungs.h"

namespace kf::KF_BACKEND::gelu {
namespace {

constexpr int kThreads = 256;

template <bool kTanh, int N, class T>
__global__ void v3_exp_kernel(const T* __restrict__ x, T* __restrict__ y, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t vectors = n / N;
  if (i < vectors) {
    compute_t<T> value[N];
    widen(load_vector<N>(x + i * N), value);
#pragma unroll
    for (int j = 0; j < N; ++j) value[j] = fast_gelu<T, kTanh>(value[j]);
    store_vector<N>(y + i * N, narrow<T>(value));
  }
  const int64_t tail = vectors * N + i;
  if (tail < n) y[tail] = from_compute<T>(fast_gelu<T, kTanh>(to_compute(x[tail])));
}

template <int N, class T>
void launch(const Args& a, void* stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(ceil_div(a.n, N), kThreads));
  const auto kernel = a.tanh ? v3_exp_kernel<true, N, T> : v3_exp_kernel<false, N, T>;
  kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(static_cast<const T*>(a.x), static_cast<T*>(a.y), a.n);
}

}  // namespace

void v3_exp(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    aligned_16(a.x, a.y) ? launch<16 / sizeof(T), T>(a, stream) : launch<1, T>(a, stream);
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::gelu
