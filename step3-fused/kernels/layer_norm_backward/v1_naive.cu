// layer_norm_backward v1_naive: a warp a row, then a thread a column
//
// Idea      The gradients go in two directions. grad_x needs sums along its row, so a warp takes a row, as in
//           layer_norm's v1: it reads x and grad for the sums, and once more for the result. grad_weight and grad_bias
//           need sums down a column, so a second kernel gives each column a thread, which walks through all rows.
// Launch    grid ⌈rows/8⌉, block 256 = 8 warps; then grid ⌈width/256⌉, block 256; no shared memory
// Moves     (7·rows·width + 3·width)·sizeof(T) bytes (grad_sum: one more rows·width); about 16·rows·width FLOPs
//           scratch: what each row's saved mean lacks, rows·4 bytes (float64: 8)
// Limits    rows ≤ 8·(2³¹−1), width ≤ 256·(2³¹−1). The second kernel has no more threads than columns: at 768 they keep
//           three of an H200's 132 multiprocessors busy
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step2/reduce.h>

#include "row.h"
#include "rungs.h"

namespace kf::KF_BACKEND::layer_norm_backward {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 256;

template <class T, class C = compute_t<T>>
__global__ void v1_naive_rows_kernel(const T* __restrict__ grad, const T* __restrict__ x, const T* __restrict__ weight,
                                     const C* __restrict__ mean, const C* __restrict__ rstd,
                                     const T* __restrict__ grad_sum, T* __restrict__ grad_x, C* __restrict__ rest,
                                     int64_t rows, int64_t width) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  if (row >= rows) return;  // a whole warp leaves, and none waits for it
  const int lane = threadIdx.x % kWarpSize;
  const int64_t first = row * width;
  RowSums<C> sums;
  for (int64_t c = lane; c < width; c += kWarpSize) {
    sums.add(product(to_compute(grad[first + c]), to_compute(weight[c])), to_compute(x[first + c]) - mean[row]);
  }
  for (C& sum : sums.value) sum = warp_sum(sum);
  const RowGradient<C> gradient(sums, mean[row], rstd[row], width);
  for (int64_t c = lane; c < width; c += kWarpSize) {
    const C g = product(to_compute(grad[first + c]), to_compute(weight[c]));
    C result = gradient.of_x(g, gradient.normalized(to_compute(x[first + c])));
    if (grad_sum != nullptr) result += to_compute(grad_sum[first + c]);
    grad_x[first + c] = from_compute<T>(result);
  }
  if (lane == 0) rest[row] = gradient.rest;
}

template <class T, class C = compute_t<T>>
__global__ void v1_naive_columns_kernel(const T* __restrict__ grad, const T* __restrict__ x, const C* __restrict__ mean,
                                        const C* __restrict__ rest, const C* __restrict__ rstd,
                                        T* __restrict__ grad_weight, T* __restrict__ grad_bias, int64_t rows,
                                        int64_t width) {
  const int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= width) return;
  C of_weight = 0, of_bias = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const C g = to_compute(grad[row * width + column]);
    of_weight += g * (to_compute(x[row * width + column]) - mean[row] - rest[row]) * rstd[row];
    of_bias += g;
  }
  grad_weight[column] = from_compute<T>(of_weight);
  grad_bias[column] = from_compute<T>(of_bias);
}

}  // namespace

std::string v1_naive_can_implement(const Args& a) {
  constexpr int64_t kMost = int64_t{kWarps} * INT32_MAX;
  return a.rows <= kMost ? "" : "takes rows ≤ " + std::to_string(kMost) + ", got " + std::to_string(a.rows);
}

int64_t v1_naive_scratch_bytes(const Args& a) { return a.rows * (a.dtype == DType::kFloat64 ? 8 : 4); }

void v1_naive(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    using C = compute_t<T>;
    const auto grad = static_cast<const T*>(a.grad), x = static_cast<const T*>(a.x);
    const auto mean = static_cast<const C*>(a.mean), rstd = static_cast<const C*>(a.rstd);
    const auto rest = static_cast<C*>(a.scratch);
    v1_naive_rows_kernel<<<static_cast<unsigned>(ceil_div(a.rows, kWarps)), kWarps * kWarpSize, 0, as_stream(stream)>>>(
        grad, x, static_cast<const T*>(a.weight), mean, rstd, static_cast<const T*>(a.grad_sum),
        static_cast<T*>(a.grad_x), rest, a.rows, a.width);
    check_launch();
    v1_naive_columns_kernel<<<static_cast<unsigned>(ceil_div(a.width, kThreads)), kThreads, 0, as_stream(stream)>>>(
        grad, x, mean, rest, rstd, static_cast<T*>(a.grad_weight), static_cast<T*>(a.grad_bias), a.rows, a.width);
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::layer_norm_backward
