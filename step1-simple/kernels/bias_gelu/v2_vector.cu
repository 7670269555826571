// bias_gelu v2_vector: 16 bytes a thread
//
// Idea      As scale's v2: 128-bit loads and stores. The bias is loaded as a vector too, since N divides the width and
//           so a vector never crosses the end of a row. One division finds the column for N elements instead of one.
// Since v1  A thread owns N neighbours. Where N does not divide the width, or a pointer does not start at a multiple of
//           16 bytes, N is 1 and this is v1 again.
// Launch    grid ⌈rows·width/N/256⌉, block 256, no shared memory; N = 16/sizeof(T)
// Moves     (2·rows·width + width)·sizeof(T) bytes; about 10·rows·width FLOPs and one tanh or erfc an element
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
__global__ void v2_vector_kernel(const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ y, int64_t n,
                                 int64_t width) {
  const int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N;
  if (i >= n) return;
  Vector<T, N> v = load_vector<N>(x + i);
  const Vector<T, N> b = load_vector<N>(bias + i % width);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const auto sum = to_compute(v.element[j]) + to_compute(b.element[j]);
    v.element[j] = from_compute<T>(kTanh ? gelu_tanh(sum) : gelu_erf(sum));
  }
  store_vector<N>(y + i, v);
}

template <bool kTanh, int N, class T>
void launch(const Args& a, void* stream) {
  const int64_t n = a.rows * a.width;
  const auto blocks = static_cast<unsigned>(ceil_div(n / N, kThreads));
  v2_vector_kernel<kTanh, N><<<blocks, kThreads, 0, as_stream(stream)>>>(
      static_cast<const T*>(a.x), static_cast<const T*>(a.bias), static_cast<T*>(a.y), n, a.width);
}

}  // namespace

void v2_vector(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    constexpr int kVector = 16 / sizeof(T);
    if (a.width % kVector == 0 && aligned_16(a.x, a.bias, a.y)) {
      a.tanh ? launch<true, kVector, T>(a, stream) : launch<false, kVector, T>(a, stream);
    } else {
      a.tanh ? launch<true, 1, T>(a, stream) : launch<false, 1, T>(a, stream);
    }
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::bias_gelu
