// attention_backward v1_naive: the formulas as they stand, four launches
//
// Idea      Four launches: Δ, a thread a query; the weights and the gradients of the scores, a thread a score; dq, a
//           thread an element; dk and dv, a thread an element of each. The weights are computed again from the
//           log-sum-exp, with no maximum and no sum: they need nothing that another thread knows.
//           Why Δ: softmax's gradient is weight·(g − Σ weight·g), where g[j] = grad·v[j]. Its sum over keys is
//           grad·Σ weight[j]·v[j], and that is grad·out: a dot product of D columns instead of Sk.
// Launch    grid ⌈B·H·Sq/256⌉, then ⌈B·H·Sq·Sk/256⌉, ⌈B·H·Sq·D/256⌉ and ⌈B·Hkv·Sk·D/256⌉; block 256
// Moves     B·((4·H·Sq + 4·Hkv·Sk)·D·sizeof(T) + H·(5·Sq·Sk + 4·Sq)·4) bytes: each tensor once, and the scores, written
//           twice and read three times; 10·B·H·Sq·Sk·D FLOPs (less where causal hides scores), B·H·Sq·Sk exponentials
// Limits    8·B·H·Sq·Sk bytes of scratch (16 for float64); B·H·Sq·max(Sk, D) and B·Hkv·Sk·D ≤ 256·(2³¹−1).
//           With dropout a call of Philox for each weight
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step2/attention/dropout.h>
#include <step2/online_softmax.h>

#include "packed.h"
#include "pairs.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_backward {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void delta_kernel(Args a, compute_t<T>* __restrict__ delta) {
  using C = compute_t<T>;
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= a.batch * a.heads * a.q_length) return;
  const int64_t head = i / a.q_length, query = i % a.q_length;
  const T* grad = row_of(static_cast<const T*>(a.grad), a.grad_stride, head, a.heads, query);
  const T* out = row_of(static_cast<const T*>(a.out), a.out_stride, head, a.heads, query);
  C sum = a.grad_lse == nullptr ? C(0) : -static_cast<const C*>(a.grad_lse)[i];
  for (int64_t d = 0; d < a.head_dim; ++d) sum += to_compute(grad[d]) * to_compute(out[d]);
  delta[i] = sum;
}

template <bool kPacked, class T>
__global__ void scores_kernel(Args a, const compute_t<T>* __restrict__ delta, compute_t<T>* __restrict__ weights,
                              compute_t<T>* __restrict__ grad_scores) {
  using C = compute_t<T>;
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= a.batch * a.heads * a.q_length * a.k_length) return;
  const int64_t key = i % a.k_length;
  const int64_t row = i / a.k_length;  // of all queries
  const int64_t query = row % a.q_length, head = row / a.q_length;
  C weight = 0, grad_score = 0;
  bool seen;
  if constexpr (kPacked) {
    const Seen keys = Documents(a).keys_of(static_cast<int>(query));
    seen = key >= keys.begin && key < keys.end;
  } else {
    seen = sees(a, keys_of(a, head), query, key);
  }
  if (seen) {
    const T* q = row_of(static_cast<const T*>(a.q), a.q_stride, head, a.heads, query);
    const T* grad = row_of(static_cast<const T*>(a.grad), a.grad_stride, head, a.heads, query);
    const T* k = row_of(static_cast<const T*>(a.k), a.k_stride, kv_head_of(a, head), a.kv_heads, key);
    const T* v = row_of(static_cast<const T*>(a.v), a.v_stride, kv_head_of(a, head), a.kv_heads, key);
    C score = 0, grad_weight = 0;
    for (int64_t d = 0; d < a.head_dim; ++d) score += to_compute(q[d]) * to_compute(k[d]);
    for (int64_t d = 0; d < a.head_dim; ++d) grad_weight += to_compute(grad[d]) * to_compute(v[d]);
    weight = exponential(score * static_cast<C>(a.scale) - subtracted(static_cast<const C*>(a.lse)[row]));
    const C factor = attention::AttentionDropout(a).template factor<C>(head, query, key);
    grad_score = weight * (factor * grad_weight - delta[row]);
    weight *= factor;  // as v met it
  }
  weights[i] = weight;
  grad_scores[i] = grad_score;
}

template <bool kPacked, class T>
__global__ void dq_kernel(Args a, const compute_t<T>* __restrict__ grad_scores) {
  using C = compute_t<T>;
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= a.batch * a.heads * a.q_length * a.head_dim) return;
  const int64_t d = i % a.head_dim;
  const int64_t row = i / a.head_dim;
  const int64_t query = row % a.q_length, head = row / a.q_length;
  const T* k = row_of(static_cast<const T*>(a.k), a.k_stride, kv_head_of(a, head), a.kv_heads, 0);
  KeyRange seen = keys_seen(a, keys_of(a, head), query);  // where no key is, k may hold anything, NaN too
  if constexpr (kPacked) {
    const Seen keys = Documents(a).keys_of(static_cast<int>(query));
    seen = {keys.begin, keys.end};
  }
  C sum = 0;
  for (int64_t key = seen.begin; key < seen.end; ++key) {
    sum += grad_scores[row * a.k_length + key] * to_compute(k[key * a.k_stride.seq + d]);
  }
  row_of(static_cast<T*>(a.dq), a.dq_stride, head, a.heads, query)[d] = from_compute<T>(sum * static_cast<C>(a.scale));
}

template <bool kPacked, class T>
__global__ void dk_dv_kernel(Args a, const compute_t<T>* __restrict__ weights,
                             const compute_t<T>* __restrict__ grad_scores) {
  using C = compute_t<T>;
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= a.batch * a.kv_heads * a.k_length * a.head_dim) return;
  const int64_t d = i % a.head_dim;
  const int64_t key = i / a.head_dim % a.k_length, kv_head = i / a.head_dim / a.k_length;
  const int64_t group = a.heads / a.kv_heads;
  const KeyRange keys = keys_of(a, kv_head * group);
  int64_t first = key >= keys.begin && key < keys.end ? first_to_see(a, key) : a.q_length;
  [[maybe_unused]] int64_t end = 0;  // of a packed row
  if constexpr (kPacked) {
    const Seen queries = Documents(a).queries_of(static_cast<int>(key));
    first = queries.begin, end = queries.end;
  }
  C dk = 0, dv = 0;
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const T* q = row_of(static_cast<const T*>(a.q), a.q_stride, head, a.heads, 0);
    const T* grad = row_of(static_cast<const T*>(a.grad), a.grad_stride, head, a.heads, 0);
    for (int64_t query = first; query < (kPacked ? end : a.q_length);
         ++query) {  // the others may be padding, and hold NaN
      const int64_t score = (head * a.q_length + query) * a.k_length + key;
      dk += grad_scores[score] * to_compute(q[query * a.q_stride.seq + d]);
      dv += weights[score] * to_compute(grad[query * a.grad_stride.seq + d]);
    }
  }
  row_of(static_cast<T*>(a.dk), a.dk_stride, kv_head, a.kv_heads, key)[d] =
      from_compute<T>(dk * static_cast<C>(a.scale));
  row_of(static_cast<T*>(a.dv), a.dv_stride, kv_head, a.kv_heads, key)[d] = from_compute<T>(dv);
}

unsigned blocks_for(int64_t threads) { return static_cast<unsigned>(ceil_div(threads, kThreads)); }

}  // namespace

// Δ, all weights and all gradients of scores.
int64_t v1_naive_scratch_bytes(const Args& a) {
  return a.batch * a.heads * a.q_length * (1 + 2 * a.k_length) * (a.dtype == DType::kFloat64 ? 8 : 4);
}

void v1_naive(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    using C = compute_t<T>;
    const int64_t rows = a.batch * a.heads * a.q_length, scores = rows * a.k_length;
    auto* delta = static_cast<C*>(a.scratch);
    C *weights = delta + rows, *grad_scores = weights + scores;
    delta_kernel<T><<<blocks_for(rows), kThreads, 0, as_stream(stream)>>>(a, delta);
    check_launch();
    with_packing(a, [&](auto packs) {
      constexpr bool kPacked = decltype(packs)::value;
      scores_kernel<kPacked, T><<<blocks_for(scores), kThreads, 0, as_stream(stream)>>>(a, delta, weights, grad_scores);
      check_launch();
      dq_kernel<kPacked, T><<<blocks_for(rows * a.head_dim), kThreads, 0, as_stream(stream)>>>(a, grad_scores);
      check_launch();
      const int64_t elements = a.batch * a.kv_heads * a.k_length * a.head_dim;
      dk_dv_kernel<kPacked, T><<<blocks_for(elements), kThreads, 0, as_stream(stream)>>>(a, weights, grad_scores);
      check_launch();
    });
  });
}

}  // namespace kf::KF_BACKEND::attention_backward
