// Δ of all queries, from v2 on: grad·out − grad_lse, a warp a query.
#pragma once

#include <kf/launch.h>
#include <kf/numeric.h>
#include <step2/online_softmax.h>
#include <step2/reduce.h>

#include <algorithm>

#include "pairs.h"

namespace kf::KF_BACKEND::attention_backward {

constexpr int kDeltaRows = 4;                  // of a block at a time
constexpr int64_t kMostDeltaBlocks = 1 << 20;  // more rows than these have are taken in further rounds

// Of `length` rows a head; those beyond the last query get 0. Where `lse` is not null it gets what is subtracted from a
// query's scores in base 2, +∞ beyond the last query: weights there are 0.
template <class T>
__global__ void delta_kernel(Args a, float* __restrict__ delta, float* __restrict__ lse, int64_t length) {
  const int64_t rows = a.batch * a.heads * length;
  for (int64_t row = int64_t{blockIdx.x} * kDeltaRows + threadIdx.y; row < rows; row += gridDim.x * kDeltaRows) {
    const int64_t head = row / length, query = row % length;
    float sum = 0, log_sum_exp = INFINITY;
    if (query < a.q_length) {
      const T* grad = row_of(static_cast<const T*>(a.grad), a.grad_stride, head, a.heads, query);
      const T* out = row_of(static_cast<const T*>(a.out), a.out_stride, head, a.heads, query);
      for (int64_t d = threadIdx.x; d < a.head_dim; d += kWarpSize) sum += to_compute(grad[d]) * to_compute(out[d]);
      const int64_t place = head * a.q_length + query;
      sum = warp_sum(sum);
      if (a.grad_lse != nullptr) sum -= static_cast<const float*>(a.grad_lse)[place];
      log_sum_exp = subtracted(static_cast<const float*>(a.lse)[place]) * static_cast<float>(kLog2e);
    }
    if (threadIdx.x != 0) continue;
    delta[row] = sum;
    if (lse != nullptr) lse[row] = log_sum_exp;
  }
}

// Writes Δ, and `lse` where it is not null, of `length` rows a head, at least as many as there are queries.
template <class T>
void launch_delta(const Args& a, float* delta, float* lse, int64_t length, void* stream) {
  const int64_t wanted = ceil_div(a.batch * a.heads * length, kDeltaRows);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(wanted, kMostDeltaBlocks));
  delta_kernel<T><<<blocks, dim3(kWarpSize, kDeltaRows), 0, as_stream(stream)>>>(a, delta, lse, length);
  check_launch();
}

// Writes Δ into a.scratch.
template <class T>
float* launch_delta(const Args& a, void* stream) {
  auto* delta = static_cast<float*>(a.scratch);
  launch_delta<T>(a, delta, nullptr, a.q_length, stream);
  return delta;
}

}  // namespace kf::KF_BACKEND::attention_backward
