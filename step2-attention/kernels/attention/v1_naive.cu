// attention v1_naive: scores, softmax, weighted sum, one launch each
//
// Idea      The formula as it is written. A thread a score, a thread a row of scores, a thread an output element; the
//           scores lie in global memory between the launches. They are what it costs: where a query has D values, its
//           Sk scores are written, read, written and read again.
// Launch    grid ⌈B·H·Sq·Sk/256⌉, then ⌈B·H·Sq/256⌉, then ⌈B·H·Sq·D/256⌉; block 256, no shared memory
// Moves     B·((2·H·Sq + 2·Hkv·Sk)·D·sizeof(T) + H·(6·Sq·Sk + Sq)·4) bytes, the second part for scores: two
//           writes, four reads; 4·B·H·Sq·Sk·D FLOPs (less where causal hides scores) and 2·B·H·Sq·Sk exponentials
// Limits    B·H·Sq·Sk·4 bytes of scratch (·8 for float64); B·H·Sq·max(Sk, D) ≤ 256·(2³¹−1). With dropout a call of
//           Philox for each weight and column
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step2/attention/documents.h>
#include <step2/attention/dropout.h>
#include <step2/online_softmax.h>
#include <step2/reduce.h>

#include "rungs.h"

namespace kf::KF_BACKEND::attention {
namespace {

constexpr int kThreads = 256;

__device__ KeyRange keys_seen_by(const Args& a, int64_t head, int64_t query) {
  if (a.cu_seqlens != nullptr) return Documents(a).keys_of(static_cast<int>(query));
  return keys_seen(a, keys_of(a, head), query);
}

template <class T>
__global__ void scores_kernel(Args a, compute_t<T>* __restrict__ scores) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= a.batch * a.heads * a.q_length * a.k_length) return;
  const int64_t key = i % a.k_length;
  const int64_t query = i / a.k_length % a.q_length;
  const HeadRows<T> head(a, i / a.k_length / a.q_length);
  const KeyRange seen = keys_seen_by(a, head.number, query);
  if (key < seen.begin || key >= seen.end) {
    scores[i] = -INFINITY;
    return;
  }
  const T* q = head.q().at(query);
  const T* k = head.k().at(key);
  compute_t<T> sum = 0;
  for (int64_t d = 0; d < a.head_dim; ++d) sum += to_compute(q[d]) * to_compute(k[d]);
  scores[i] = sum * static_cast<compute_t<T>>(a.scale);
}

template <class C>
__global__ void softmax_kernel(C* __restrict__ scores, C* __restrict__ lse, int64_t rows, int64_t width) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  scores += row * width;

  C max = -INFINITY;
  for (int64_t c = 0; c < width; ++c) max = greater_of(max, scores[c]);
  if (max == C(-INFINITY)) max = 0;  // a query that sees no key: all its weights become 0

  C sum = 0;
  for (int64_t c = 0; c < width; ++c) sum += exponential(scores[c] - max);

  const C inverse = sum == 0 ? C(0) : 1 / sum;
  for (int64_t c = 0; c < width; ++c) scores[c] = exponential(scores[c] - max) * inverse;
  lse[row] = max + logarithm(sum);
}

template <bool kDropout, class T>
__global__ void output_kernel(Args a, const compute_t<T>* __restrict__ weights) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= a.batch * a.heads * a.q_length * a.head_dim) return;
  const int64_t d = i % a.head_dim;
  const int64_t query = i / a.head_dim % a.q_length;
  const HeadRows<T> head(a, i / a.head_dim / a.q_length);
  weights += (head.number * a.q_length + query) * a.k_length;
  const Rows<const T> v = head.v();
  const KeyRange seen = keys_seen_by(a, head.number, query);  // where no key is, v may hold anything, NaN too
  const AttentionDropout dropout(a);
  compute_t<T> sum = 0;
  for (int64_t key = seen.begin; key < seen.end; ++key) {
    compute_t<T> weight = weights[key];
    if constexpr (kDropout) weight *= dropout.factor<compute_t<T>>(head.number, query, key);
    sum += weight * to_compute(v.at(key)[d]);
  }
  head.out().at(query)[d] = from_compute<T>(sum);
}

unsigned blocks_for(int64_t threads) { return static_cast<unsigned>(ceil_div(threads, kThreads)); }

}  // namespace

// All scores.
int64_t v1_naive_scratch_bytes(const Args& a) {
  return a.batch * a.heads * a.q_length * a.k_length * (a.dtype == DType::kFloat64 ? 8 : 4);
}

void v1_naive(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    auto* scores = static_cast<compute_t<T>*>(a.scratch);
    const int64_t rows = a.batch * a.heads * a.q_length;
    scores_kernel<T><<<blocks_for(rows * a.k_length), kThreads, 0, as_stream(stream)>>>(a, scores);
    check_launch();
    softmax_kernel<<<blocks_for(rows), kThreads, 0, as_stream(stream)>>>(scores, static_cast<compute_t<T>*>(a.lse),
                                                                         rows, a.k_length);
    check_launch();
    with_dropout(a, [&](auto drops) {
      output_kernel<decltype(drops)::value, T>
          <<<blocks_for(rows * a.head_dim), kThreads, 0, as_stream(stream)>>>(a, scores);
      check_launch();
    });
  });
}

}  // namespace kf::KF_BACKEND::attention
