// layer_norm v1_naive: a warp a row, the row read three times
//
// Idea      LayerNorm needs the mean before the variance and the variance before the first result. The plain way reads
//           the row once for each: for the mean, for the variance, for the result. The 32 lanes take neighbouring
//           columns, so that each read is coalesced, and add up their partial sums by shuffles.
// Launch    grid ⌈rows/8⌉, block 256 = 8 warps, no shared memory
// Moves     4·rows·width·sizeof(T) bytes, three reads and a write, of which the second and third read may come from a
//           cache; about 10·rows·width FLOPs
// Limits    rows ≤ 8·(2³¹−1)
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step3/statistics.h>

#include "rungs.h"

namespace kf::KF_BACKEND::layer_norm {
namespace {

constexpr int kWarps = 8;

template <class T>
__global__ void v1_naive_kernel(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                                T* __restrict__ y, Kept<compute_t<T>> kept, int64_t rows, int64_t width,
                                compute_t<T> eps) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  if (row >= rows) return;  // a whole warp leaves, and none waits for it
  x += row * width;
  y += row * width;
  const auto s = warp_statistics(width, eps, [&](int64_t c) { return to_compute(x[c]); });  // the first two reads
  if (threadIdx.x % kWarpSize == 0) kept.keep(row, s);
  for (int64_t c = threadIdx.x % kWarpSize; c < width; c += kWarpSize) {
    y[c] = from_compute<T>(s.normalize(to_compute(x[c])) * to_compute(weight[c]) + to_compute(bias[c]));
  }
}

}  // namespace

std::string v1_naive_can_implement(const Args& a) {
  constexpr int64_t kMost = int64_t{kWarps} * INT32_MAX;
  return a.rows <= kMost ? "" : "takes rows ≤ " + std::to_string(kMost) + ", got " + std::to_string(a.rows);
}

void v1_naive(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const auto blocks = static_cast<unsigned>(ceil_div(a.rows, kWarps));
    v1_naive_kernel<<<blocks, kWarps * kWarpSize, 0, as_stream(stream)>>>(
        static_cast<const T*>(a.x), static_cast<const T*>(a.weight), static_cast<const T*>(a.bias),
        static_cast<T*>(a.y), kept_of<T>(a), a.rows, a.width, static_cast<compute_t<T>>(a.eps));
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::layer_norm
