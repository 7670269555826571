// bias_dropout_residual v4_any_width: eight elements a thread, whatever the width
//
// Idea      Eight elements are what one Philox call is good for, in every dtype; in float32 they are two vectors. As in
//           bias_gelu's v5 vectors may cross the ends of rows, and the division is a multiplication.
// Since v3  Eight elements instead of N. FastDivide in place of `%`. Odd widths keep 128-bit access, and unaligned
//           pointers keep at least the shared Philox call.
// Launch    grid ⌈⌈n/8⌉/256⌉ with n = rows·width, block 256, no shared memory
// Moves     (3·rows·width + width)·sizeof(T) bytes (the bias is read again and again, but from cache);
//           3·rows·width FLOPs and 1/8 of a Philox call an element
// Limits    rows·width ≤ 2048·(2³¹−1), rows·width² < 2⁶³
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/bias.h>
#include <step1/philox.h>

#include "rungs.h"

namespace kf::KF_BACKEND::bias_dropout_residual {
namespace {

constexpr int kThreads = 256;

template <bool kAligned, bool kWhole, class T>
__global__ void v4_any_width_kernel(const T* __restrict__ x, const T* __restrict__ bias, const T* __restrict__ residual,
                                    T* __restrict__ y, int64_t n, int64_t width, FastDivide by_width,
                                    PhiloxState philox_state, uint32_t threshold, compute_t<T> scale) {
  const int64_t block = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t i = block * 8;
  if (i >= n) return;
  compute_t<T> b[8];
  load_bias<kWhole>(bias, by_width.remainder(i), width, b);
  philox_state.read();
  const auto work = [&](auto whole, int last) {
    compute_t<T> value[8], r[8];
    load_some<kAligned>(whole, x + i, 0, last, value);
    load_some<kAligned>(whole, residual + i, 0, last, r);
    const Eight eight = philox_state.eight(block);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      value[j] = (eight.number(j) >= threshold ? scale * (value[j] + b[j]) : compute_t<T>(0)) + r[j];
    }
    store_some<kAligned>(whole, y + i, 0, last, value);
  };
  if (i + 8 <= n) {
    work(std::true_type{}, 8);
  } else {  // the last thread, where 8 does not divide n
    work(std::false_type{}, static_cast<int>(n - i));
  }
}

template <bool kAligned, bool kWhole, class T>
void launch(const Args& a, void* stream) {
  const int64_t n = a.rows * a.width;
  const auto blocks = static_cast<unsigned>(ceil_div(ceil_div(n, 8), kThreads));
  v4_any_width_kernel<kAligned, kWhole><<<blocks, kThreads, 0, as_stream(stream)>>>(
      static_cast<const T*>(a.x), static_cast<const T*>(a.bias), static_cast<const T*>(a.residual),
      static_cast<T*>(a.y), n, a.width, FastDivide(a.width), PhiloxState{a.rng_state, a.seed, a.offset}, a.threshold,
      keep_scale<compute_t<T>>(a.threshold));
}

}  // namespace

std::string v4_any_width_can_implement(const Args& a) { return too_large_for_fast_divide(a.rows, a.width); }

void v4_any_width(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    if (!aligned_16(a.x, a.residual, a.y)) {
      launch<false, false, T>(a, stream);
    } else if (a.width % 8 == 0 && aligned_16(a.bias)) {
      launch<true, true, T>(a, stream);
    } else {
      launch<true, false, T>(a, stream);
    }
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::bias_dropout_residual
