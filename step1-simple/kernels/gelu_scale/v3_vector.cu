// gelu_scale v3_vector: 16 bytes a thread, and gelu's short formula
//
// Idea      What gelu's v2 and v3 found, put together: 128-bit loads and stores, one exp and one reciprocal in place of
//           tanhf.
// Since v2  A thread owns N neighbours; the n mod N elements left over go one each to the first threads. Where x or y
//           does not start at a multiple of 16 bytes, N is 1.
// Launch    grid ⌈⌈n/N⌉/256⌉, block 256, no shared memory; N = 16/sizeof(T)
// Moves     2·n·sizeof(T) bytes; about 8·n FLOPs, one exp and one reciprocal an element
// Limits    n ≤ 256·N·(2³¹−1)
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/gelu.h>
#include <step1/vector.h>

#include "rungs.h"

namespace kf::KF_BACKEND::gelu_scale {
namespace {

constexpr int kThreads = 256;

template <bool kTanh, int N, class T>
__global__ void v3_vector_kernel(const T* __restrict__ x, T* __restrict__ y, int64_t n, compute_t<T> factor) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t vectors = n / N;
  if (i < vectors) {
    compute_t<T> value[N];
    widen(load_vector<N>(x + i * N), value);
#pragma unroll
    for (int j = 0; j < N; ++j) value[j] = factor * fast_gelu<T, kTanh>(value[j]);
    store_vector<N>(y + i * N, narrow<T>(value));
  }
  const int64_t tail = vectors * N + i;
  if (tail < n) y[tail] = from_compute<T>(factor * fast_gelu<T, kTanh>(to_compute(x[tail])));
}

template <int N, class T>
void launch(const Args& a, void* stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(ceil_div(a.n, N), kThreads));
  const auto kernel = a.tanh ? v3_vector_kernel<true, N, T> : v3_vector_kernel<false, N, T>;
  kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(static_cast<const T*>(a.x), static_cast<T*>(a.y), a.n,
                                                     static_cast<compute_t<T>>(a.factor));
}

}  // namespace

void v3_vector(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    aligned_16(a.x, a.y) ? launch<16 / sizeof(T), T>(a, stream) : launch<1, T>(a, stream);
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::gelu_scale
