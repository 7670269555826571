// bias_dropout_residual v3_vector: 16 bytes a thread, and a share of one Philox call
//
// Idea      128-bit loads and stores, and one Philox call for the N elements of a thread: all eight numbers in half
//           types, four of them in float32.
// Since v2  A thread owns N neighbours. Where N does not divide the width, or a pointer does not start at a multiple of
//           16 bytes, N is 1 and this is v2 again.
// Launch    grid ⌈rows·width/N/256⌉, block 256, no shared memory; N = 16/sizeof(T)
// Moves     (3·rows·width + width)·sizeof(T) bytes (the bias is read again and again, but from cache);
//           3·rows·width FLOPs and 1/N of a Philox call an element
// Limits    rows·width ≤ 256·N·(2³¹−1)
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/philox.h>
#include <step1/vector.h>

#include "rungs.h"

namespace kf::KF_BACKEND::bias_dropout_residual {
namespace {

constexpr int kThreads = 256;

template <int N, class T>
__global__ void v3_vector_kernel(const T* __restrict__ x, const T* __restrict__ bias, const T* __restrict__ residual,
                                 T* __restrict__ y, int64_t n, int64_t width, PhiloxState philox_state,
                                 uint32_t threshold, compute_t<T> scale) {
  const int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N;
  if (i >= n) return;
  compute_t<T> value[N], b[N], r[N];
  widen(load_vector<N>(x + i), value);
  widen(load_vector<N>(bias + i % width), b);
  widen(load_vector<N>(residual + i), r);
  philox_state.read();
  const Eight eight = philox_state.eight(i / 8);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const bool keep = eight.number(static_cast<int>(i % 8) + j) >= threshold;
    value[j] = (keep ? scale * (value[j] + b[j]) : compute_t<T>(0)) + r[j];
  }
  store_vector<N>(y + i, narrow<T>(value));
}

template <int N, class T>
void launch(const Args& a, void* stream) {
  const int64_t n = a.rows * a.width;
  const auto blocks = static_cast<unsigned>(ceil_div(n / N, kThreads));
  v3_vector_kernel<N><<<blocks, kThreads, 0, as_stream(stream)>>>(
      static_cast<const T*>(a.x), static_cast<const T*>(a.bias), static_cast<const T*>(a.residual),
      static_cast<T*>(a.y), n, a.width, PhiloxState{a.rng_state, a.seed, a.offset}, a.threshold,
      keep_scale<compute_t<T>>(a.threshold));
}

}  // namespace

void v3_vector(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    constexpr int kVector = 16 / sizeof(T);
    a.width % kVector == 0 && aligned_16(a.x, a.bias, a.residual, a.y) ? launch<kVector, T>(a, stream)
                                                                       : launch<1, T>(a, stream);
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::bias_dropout_residual
