// bias_gelu v3_vector: 16 bytes a thread
//
// Idea      As scale's v4: 128-bit loads and stores. The bias is loaded as a vector too, since N divides the width and
//           so a vector never crosses the end of a row. One division finds the column for N elements instead of one.
// Since v2  A thread owns N neighbours. Where N does not divide the width, or a pointer does not start at a multiple of
//           16 bytes, N is 1 and this is v2 again.
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
__global__ void v3_vector_kernel(const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ y, int64_t n,
                                 int64_t width) {
  const int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N;
  if (i >= n) return;
  compute_t<T> value[N], b[N];
  widen(load_vector<N>(x + i), value);
  widen(load_vector<N>(bias + i % width), b);
#pragma unroll
  for (int j = 0; j < N; ++j) value[j] = gelu_of<kTanh>(value[j] + b[j]);
  store_vector<N>(y + i, narrow<T>(value));
}

template <int N, class T>
void launch(const Args& a, void* stream) {
  const int64_t n = a.rows * a.width;
  const auto blocks = static_cast<unsigned>(ceil_div(n / N, kThreads));
  const auto kernel = a.tanh ? v3_vector_kernel<true, N, T> : v3_vector_kernel<false, N, T>;
  kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(static_cast<const T*>(a.x), static_cast<const T*>(a.bias),
                                                     static_cast<T*>(a.y), n, a.width);
}

}  // namespace

void v3_vector(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    constexpr int kVector = 16 / sizeof(T);
    a.width % kVector == 0 && aligned_16(a.x, a.bias, a.y) ? launch<kVector, T>(a, stream) : launch<1, T>(a, stream);
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::bias_gelu
