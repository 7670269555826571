// gelu v2_vector: 16 bytes a thread
//
// Idea      As scale's v4: 128-bit loads and stores. In float32 the memory is the bound then. In half types it is not:
//           a byte now carries twice the elements, and each of them its tanh.
// Since v1  A thread owns N neighbours; the n mod N elements left over go one each to the first threads. Where x or y
//           does not start at a multiple of 16 bytes, N is 1 and this is v1 again.
// Launch    grid ⌈⌈n/N⌉/256⌉, block 256, no shared memory; N = 16/sizeof(T)
// Moves     2·n·sizeof(T) bytes; about 9·n FLOPs and one tanh or erfc an element
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
__global__ void v2_vector_kernel(const T* __restrict__ x, T* __restrict__ y, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t vectors = n / N;
  if (i < vectors) {
    compute_t<T> value[N];
    widen(load_vector<N>(x + i * N), value);
#pragma unroll
    for (int j = 0; j < N; ++j) value[j] = gelu_of<kTanh>(value[j]);
    store_vector<N>(y + i * N, narrow<T>(value));
  }
  const int64_t tail = vectors * N + i;
  if (tail < n) y[tail] = from_compute<T>(gelu_of<kTanh>(to_compute(x[tail])));
}

template <int N, class T>
void launch(const Args& a, void* stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(ceil_div(a.n, N), kThreads));
  const auto kernel = a.tanh ? v2_vector_kernel<true, N, T> : v2_vector_kernel<false, N, T>;
  kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(static_cast<const T*>(a.x), static_cast<T*>(a.y), a.n);
}

}  // namespace

void v2_vector(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    aligned_16(a.x, a.y) ? launch<16 / sizeof(T), T>(a, stream) : launch<1, T>(a, stream);
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::gelu
