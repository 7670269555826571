// scale v4_vector: 16 bytes a thread
//
// Idea      One 128-bit load brings 4 floats or 8 halves. Fewer instructions move the same bytes, and each thread has
//           more of them in flight.
// Since v3  Back to a thread for each piece of work, without a loop; the piece is N neighbours instead of one element.
//           The n mod N elements left over go one each to the first threads. Where x or y does not start at a multiple
//           of 16 bytes, N is 1 and this is v2 again.
// Launch    grid ⌈⌈n/N⌉/256⌉, block 256, no shared memory; N = 16/sizeof(T)
// Moves     2·n·sizeof(T) bytes, n FLOPs
// Limits    n ≤ 256·N·(2³¹−1)
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/vector.h>

#include "rungs.h"

namespace kf::KF_BACKEND::scale {
namespace {

constexpr int kThreads = 256;

template <int N, class T>
__global__ void v4_vector_kernel(const T* __restrict__ x, T* __restrict__ y, int64_t n, compute_t<T> factor) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t vectors = n / N;
  if (i < vectors) {
    Vector<T, N> v = load_vector<N>(x + i * N);
#pragma unroll
    for (int j = 0; j < N; ++j) v.element[j] = from_compute<T>(factor * to_compute(v.element[j]));
    store_vector<N>(y + i * N, v);
  }
  const int64_t tail = vectors * N + i;
  if (tail < n) y[tail] = from_compute<T>(factor * to_compute(x[tail]));
}

template <int N, class T>
void launch(const Args& a, void* stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(ceil_div(a.n, N), kThreads));
  v4_vector_kernel<N><<<blocks, kThreads, 0, as_stream(stream)>>>(static_cast<const T*>(a.x), static_cast<T*>(a.y), a.n,
                                                                  static_cast<compute_t<T>>(a.factor));
}

}  // namespace

void v4_vector(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    aligned_16(a.x, a.y) ? launch<16 / sizeof(T), T>(a, stream) : launch<1, T>(a, stream);
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::scale
