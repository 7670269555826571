// Δ of all queries, from v2 on: grad·out − grad_lse, eight lanes a query.
#pragma once

#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/vector.h>
#include <step2/online_softmax.h>
#include <step2/reduce.h>

#include <algorithm>

#include "packed.h"
#include "pairs.h"

namespace kf::KF_BACKEND::attention_backward {

constexpr int kDeltaLanes = 8;   // of a query: 16 bytes each are GPT-2's head_dim in half types
constexpr int kDeltaRows = 128;  // of a block at a time
constexpr int kDeltaRounds = 4;  // in which it takes them
constexpr int64_t kMostDeltaBlocks = 1 << 20, kMostDeltaHeads = 65535;  // more are taken one after the other

// Neighbouring rows of Δ: row i is of query first + i, or, where that is not among begin ≤ i < end, of none.
struct RowsOfQueries {
  int64_t first, begin, end;

  __device__ int64_t at(int i) const { return first + i >= begin && first + i < end ? first + i : -1; }
};

// Rows are those of queries.
struct QueryRows {
  static constexpr bool kPacked = false;

  __device__ static RowsOfQueries rows(const Args& a, int64_t first) { return {first, 0, a.q_length}; }
};

// Of `length` rows a head; those beyond the last query get 0. Where `lse` is not null it gets what is subtracted from a
// query's scores in base 2, +∞ beyond the last query: weights there are 0. Loads N elements at a time.
// `counters`, where not null: two that the kernels after this one count with, from 0. All lanes of a row call
// more(a, head, query), for what else is to be done before those kernels; of a packed row, see BeginPackedTurns.
template <int N, class T, class More>
__global__ void __launch_bounds__(kDeltaLanes* kDeltaRows / kDeltaRounds, 4)
    delta_kernel(Args a, float* __restrict__ delta, float* __restrict__ lse, int64_t length, unsigned* counters,
                 More more) {
  if (counters != nullptr && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x < 2 && threadIdx.y == 0) {
    counters[threadIdx.x] = 0;
  }
  if constexpr (More::kPacked) more.find_units(a);
  const int64_t heads = a.batch * a.heads;
  for (int64_t head = blockIdx.y; head < heads; head += gridDim.y) {
    const T* const grads = row_of(static_cast<const T*>(a.grad), a.grad_stride, head, a.heads, 0);
    const T* const outs = row_of(static_cast<const T*>(a.out), a.out_stride, head, a.heads, 0);
    for (int64_t first = int64_t{blockIdx.x} * kDeltaRows; first < length; first += gridDim.x * kDeltaRows) {
      float sum[kDeltaRounds] = {}, its_lse[kDeltaRounds] = {};
      const RowsOfQueries halves[] = {more.rows(a, first), more.rows(a, first + kDeltaRows / 2)};
      const auto query_of = [&](int round) {
        constexpr int kRounds = kDeltaRounds / 2, kRows = kDeltaRows / kDeltaRounds;
        return halves[round / kRounds].at(round % kRounds * kRows + static_cast<int>(threadIdx.y));
      };
#pragma unroll
      for (int round = 0; round < kDeltaRounds; ++round) {  // all loads are in flight before the first is used
        const int64_t row = query_of(round);
        if (row < 0) continue;
        if (lse != nullptr) its_lse[round] = static_cast<const float*>(a.lse)[head * a.q_length + row];
        for (int64_t d = threadIdx.x * N; d < a.head_dim; d += kDeltaLanes * N) {
          float g[N], o[N];
          widen(load_vector<N>(grads + row * a.grad_stride.seq + d), g);
          widen(load_vector<N>(outs + row * a.out_stride.seq + d), o);
#pragma unroll
          for (int i = 0; i < N; ++i) sum[round] += g[i] * o[i];
        }
      }
#pragma unroll
      for (int round = 0; round < kDeltaRounds; ++round) {
#pragma unroll
        for (int away = kDeltaLanes / 2; away > 0; away /= 2) {
          sum[round] += __shfl_xor_sync(kFullWarp, sum[round], away);
        }
        const int64_t row = first + round * blockDim.y + threadIdx.y;
        if (row >= length) continue;
        const int64_t query = query_of(round);
        const bool exists = query >= 0;
        more(a, head, row);
        if constexpr (More::kPacked) {
          if (exists && its_lse[round] == -INFINITY) more.blind(a, head, query);
        }
        if (threadIdx.x != 0) continue;
        if (exists && a.grad_lse != nullptr) {
          sum[round] -= static_cast<const float*>(a.grad_lse)[head * a.q_length + query];
        }
        delta[head * length + row] = sum[round];
        if (lse == nullptr) continue;
        lse[head * length + row] = exists ? subtracted(its_lse[round]) * static_cast<float>(kLog2e) : INFINITY;
      }
    }
  }
}

struct NothingMore : QueryRows {
  __device__ void operator()(const Args&, int64_t, int64_t) const {}
};

// Writes Δ, and `lse` where it is not null, of `length` rows a head, at least as many as there are queries. N > 1: rows
// begin at multiples of N elements, and head_dim is one.
template <int N, class T, class More = NothingMore>
void launch_delta(const Args& a, float* delta, float* lse, int64_t length, unsigned* counters, void* stream,
                  More more = {}) {
  const dim3 grid(static_cast<unsigned>(std::min(ceil_div(length, kDeltaRows), kMostDeltaBlocks)),
                  static_cast<unsigned>(std::min(a.batch * a.heads, kMostDeltaHeads)));
  const dim3 block(kDeltaLanes, kDeltaRows / kDeltaRounds);
  delta_kernel<N, T><<<grid, block, 0, as_stream(stream)>>>(a, delta, lse, length, counters, more);
  check_launch();
}

// Δ, one number a query.
inline int64_t delta_bytes(const Args& a) {
  return a.batch * a.heads * a.q_length * static_cast<int64_t>(sizeof(float));
}

// Writes Δ into a.scratch.
template <int N, class T>
float* launch_delta(const Args& a, void* stream) {
  auto* delta = static_cast<float*>(a.scratch);
  launch_delta<N, T>(a, delta, nullptr, a.q_length, nullptr, stream);
  return delta;
}

}  // namespace kf::KF_BACKEND::attention_backward
