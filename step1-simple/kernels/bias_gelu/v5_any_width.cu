// bias_gelu v5_any_width: vectors that cross the ends of rows, and no division
//
// Idea      x and y are long arrays that begin at a multiple of 16 bytes; where rows begin does not matter to a vector
//           of them. Only the bias minds: for an odd width its N numbers are collected one by one, from cache, and
//           after the last column comes the first. And a width that is known at the launch needs no division in the
//           kernel.
// Since v4  N no longer has to divide the width. FastDivide in place of `%`.
// Launch    grid ⌈⌈n/N⌉/256⌉ with n = rows·width, block 256, no shared memory; N = 16/sizeof(T)
// Moves     (2·rows·width + width)·sizeof(T) bytes (the bias is read again and again, but from cache);
//           about 10·rows·width FLOPs, one exp and one reciprocal an element
// Limits    rows·width ≤ 256·N·(2³¹−1), rows·width² < 2⁶³
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/bias.h>
#include <step1/gelu.h>

#include "rungs.h"

namespace kf::KF_BACKEND::bias_gelu {
namespace {

constexpr int kThreads = 256;

template <bool kTanh, bool kWhole, int N, class T>
__global__ void v5_any_width_kernel(const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ y, int64_t n,
                                    int64_t width, FastDivide by_width) {
  const int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N;
  if (i >= n) return;
  compute_t<T> value[N], b[N];
  load_bias<kWhole>(bias, by_width.remainder(i), width, b);
  if (i + N <= n) {
    widen(load_vector<N>(x + i), value);
#pragma unroll
    for (int j = 0; j < N; ++j) value[j] = fast_gelu<T, kTanh>(value[j] + b[j]);
    store_vector<N>(y + i, narrow<T>(value));
  } else {  // the last thread, where N does not divide n
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (i + j < n) y[i + j] = from_compute<T>(fast_gelu<T, kTanh>(to_compute(x[i + j]) + b[j]));
    }
  }
}

template <bool kWhole, int N, class T>
void launch(const Args& a, void* stream) {
  const int64_t n = a.rows * a.width;
  const auto blocks = static_cast<unsigned>(ceil_div(ceil_div(n, N), kThreads));
  const auto kernel = a.tanh ? v5_any_width_kernel<true, kWhole, N, T> : v5_any_width_kernel<false, kWhole, N, T>;
  kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(static_cast<const T*>(a.x), static_cast<const T*>(a.bias),
                                                     static_cast<T*>(a.y), n, a.width, FastDivide(a.width));
}

}  // namespace

std::string v5_any_width_can_implement(const Args& a) { return too_large_for_fast_divide(a.rows, a.width); }

void v5_any_width(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    constexpr int kVector = 16 / sizeof(T);
    if (!aligned_16(a.x, a.y)) {
      launch<false, 1, T>(a, stream);
    } else if (a.width % kVector == 0 && aligned_16(a.bias)) {
      launch<true, kVector, T>(a, stream);
    } else {
      launch<false, kVector, T>(a, stream);
    }
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::bias_gelu
