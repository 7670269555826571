// bias_dropout_residual v2_naive: three operations, one trip through memory
//
// Idea      Sum, mask and product stay in registers: three sevenths of v1's bytes, and in half types two roundings
//           less. What is left to pay is the random number: a Philox call makes eight of 16 bits, and a thread with one
//           element throws seven away.
// Since v1  One kernel for three.
// Launch    grid ⌈rows·width/256⌉, block 256, no shared memory
// Moves     (3·rows·width + width)·sizeof(T) bytes (the bias is read again and again, but from cache);
//           3·rows·width FLOPs and a Philox call, about 90 integer instructions, an element
// Limits    rows·width ≤ 256·(2³¹−1)
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/philox.h>

#include "rungs.h"

namespace kf::KF_BACKEND::bias_dropout_residual {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void v2_naive_kernel(const T* __restrict__ x, const T* __restrict__ bias, const T* __restrict__ residual,
                                T* __restrict__ y, int64_t n, int64_t width, PhiloxState philox_state,
                                uint32_t threshold, compute_t<T> scale) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= n) return;
  philox_state.read();
  const bool keep = philox_state.eight(i / 8).number(static_cast<int>(i % 8)) >= threshold;
  const auto sum = to_compute(x[i]) + to_compute(bias[i % width]);
  y[i] = from_compute<T>((keep ? scale * sum : compute_t<T>(0)) + to_compute(residual[i]));
}

}  // namespace

void v2_naive(const Args& a, void* stream) {
  const int64_t n = a.rows * a.width;
  const auto blocks = static_cast<unsigned>(ceil_div(n, kThreads));
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    v2_naive_kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(
        static_cast<const T*>(a.x), static_cast<const T*>(a.bias), static_cast<const T*>(a.residual),
        static_cast<T*>(a.y), n, a.width, PhiloxState{a.rng_state, a.seed, a.offset}, a.threshold,
        keep_scale<compute_t<T>>(a.threshold));
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::bias_dropout_residual
