// Δ of all queries, from v2 on: grad·out − grad_lse, eight lanes a query.
#pragma once

#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/vector.h>
#include <step2/online_softmax.h>
#include <step2/reduce.h>

#include <algorithm>

#include "pairs.h"

namespace kf::KF_BACKEND::attention_backward {

constexpr int kDeltaLanes = 8;                 // of a query: 16 bytes each are GPT-2's head_dim in half types
constexpr int kDeltaRows = 32;                 // of a block at a time
constexpr int64_t kMostDeltaBlocks = 1 << 20;  // more rows than these have are taken in further rounds

// Of `length` rows a head; those beyond the last query get 0. Where `lse` is not null it gets what is subtracted from a
// query's scores in base 2, +∞ beyond the last query: weights there are 0. Loads N elements at a time.
// `counters`, where not null: two that the kernels after this one count with, from 0.
template <int N, class T>
__global__ void delta_kernel(Args a, float* __restrict__ delta, float* __restrict__ lse, int64_t length,
                             unsigned* counters) {
  if (counters != nullptr && blockIdx.x == 0 && threadIdx.x < 2 && threadIdx.y == 0) counters[threadIdx.x] = 0;
  const int64_t rows = a.batch * a.heads * length;
  for (int64_t first = int64_t{blockIdx.x} * kDeltaRows; first < rows; first += gridDim.x * kDeltaRows) {
    const int64_t row = first + threadIdx.y, head = row / length, query = row % length;
    const bool exists = row < rows && query < a.q_length;
    float sum = 0;
    if (exists) {
      const T* grad = row_of(static_cast<const T*>(a.grad), a.grad_stride, head, a.heads, query);
      const T* out = row_of(static_cast<const T*>(a.out), a.out_stride, head, a.heads, query);
      for (int64_t d = threadIdx.x * N; d < a.head_dim; d += kDeltaLanes * N) {
        float g[N], o[N];
        widen(load_vector<N>(grad + d), g);
        widen(load_vector<N>(out + d), o);
#pragma unroll
        for (int i = 0; i < N; ++i) sum += g[i] * o[i];
      }
    }
#pragma unroll
    for (int away = kDeltaLanes / 2; away > 0; away /= 2) sum += __shfl_xor_sync(kFullWarp, sum, away);
    if (threadIdx.x != 0 || row >= rows) continue;
    const int64_t place = head * a.q_length + query;
    if (exists && a.grad_lse != nullptr) sum -= static_cast<const float*>(a.grad_lse)[place];
    delta[row] = sum;
    if (lse == nullptr) continue;
    lse[row] = exists ? subtracted(static_cast<const float*>(a.lse)[place]) * static_cast<float>(kLog2e) : INFINITY;
  }
}

// Writes Δ, and `lse` where it is not null, of `length` rows a head, at least as many as there are queries. N > 1: rows
// begin at multiples of N elements, and head_dim is one.
template <int N, class T>
void launch_delta(const Args& a, float* delta, float* lse, int64_t length, unsigned* counters, void* stream) {
  const int64_t wanted = ceil_div(a.batch * a.heads * length, kDeltaRows);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(wanted, kMostDeltaBlocks));
  delta_kernel<N, T><<<blocks, dim3(kDeltaLanes, kDeltaRows), 0, as_stream(stream)>>>(a, delta, lse, length, counters);
  check_launch();
}

// Writes Δ into a.scratch.
template <int N, class T>
float* launch_delta(const Args& a, void* stream) {
  auto* delta = static_cast<float*>(a.scratch);
  launch_delta<N, T>(a, delta, nullptr, a.q_length, nullptr, stream);
  return delta;
}

}  // namespace kf::KF_BACKEND::attention_backward
