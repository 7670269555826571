// bias_dropout_residual v1_unfused: a launch for each operation
//
// Idea      Bias, dropout and residual, each from memory to memory. The random numbers come from a counter, not from a
//           state that must be kept: element i asks Philox for number i, so any thread can compute any element's mask,
//           here, in other rungs and again in the backward. No mask is stored.
// Launch    three times: grid ⌈rows·width/256⌉, block 256, no shared memory
// Moves     (7·rows·width + width)·sizeof(T) bytes; 3·rows·width FLOPs and a Philox call, about 90 integer
//           instructions, an element
// Limits    rows·width ≤ 256·(2³¹−1); rounds x + bias, and what dropout leaves of it
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/philox.h>

#include "rungs.h"

namespace kf::KF_BACKEND::bias_dropout_residual {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void add_bias_kernel(const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ y, int64_t n,
                                int64_t width) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) y[i] = from_compute<T>(to_compute(x[i]) + to_compute(bias[i % width]));
}

template <class T>
__global__ void dropout_kernel(T* y, int64_t n, PhiloxState philox_state, uint32_t threshold, compute_t<T> scale) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= n) return;
  philox_state.read();
  const bool keep = philox_state.eight(i / 8).number(static_cast<int>(i % 8)) >= threshold;
  y[i] = from_compute<T>(keep ? scale * to_compute(y[i]) : compute_t<T>(0));
}

template <class T>
__global__ void add_residual_kernel(const T* __restrict__ residual, T* y, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) y[i] = from_compute<T>(to_compute(y[i]) + to_compute(residual[i]));
}

}  // namespace

void v1_unfused(const Args& a, void* stream) {
  const int64_t n = a.rows * a.width;
  const auto blocks = static_cast<unsigned>(ceil_div(n, kThreads));
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    T* y = static_cast<T*>(a.y);
    add_bias_kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(static_cast<const T*>(a.x),
                                                                static_cast<const T*>(a.bias), y, n, a.width);
    check_launch();
    dropout_kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(y, n, PhiloxState{a.rng_state, a.seed, a.offset},
                                                               a.threshold, keep_scale<compute_t<T>>(a.threshold));
    check_launch();
    add_residual_kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(static_cast<const T*>(a.residual), y, n);
    check_launch();
  });
}

}  // namespace kf::KF_BACKEND::bias_dropout_residual
