// The same ops in plain C++: what each kernel must compute. Attention is blocked like v2_tiled, for the same reason:
// what is used again should still be near.
#include "attention_cpu.h"

#include <kf/cpu.h>
#include <step2/vectorised_cpu.h>

#include <vector>

namespace kf::cpu {
namespace {

constexpr int64_t kWork = 1 << 15;   // multiplications below which a second thread costs more than it brings
constexpr int64_t kQueryBlock = 32;  // queries that read a block of keys while it is in cache
constexpr int64_t kKeyBlock = 128;

// ---- softmax ----

template <class C>
KF_CPU_INLINE void softmax_inline(const C* x, C* y, int64_t width) {
  const C inverse = 1 / exp_and_sum(x, y, width, max_of(x, width));
  for (int64_t c = 0; c < width; ++c) y[c] *= inverse;
}
KF_CPU_CLONES void softmax_row(const float* x, float* y, int64_t width) { softmax_inline(x, y, width); }
KF_CPU_CLONES void softmax_row(const double* x, double* y, int64_t width) { softmax_inline(x, y, width); }

// ---- attention ----

// What one thread holds of the head it works on, and of its block of queries.
template <class C>
struct Head {
  std::vector<C> k_transposed;  // [D, Sk]: so that one query's scores for neighbouring keys are neighbours
  std::vector<C> v;             // [Sk, D]
  std::vector<C> q;             // [query block, D], times scale
  std::vector<C> scores;        // [query block, key block]
  std::vector<C> out;           // [query block, D]
  std::vector<C> max, sum;      // [query block]
};

// `queries` queries against all keys. Query i sees `seen` + i keys, if causal; all of them otherwise.
template <class C>
KF_CPU_INLINE void attend_inline(Head<C>& h, int64_t queries, int64_t k_length, int64_t dim, bool causal,
                                 int64_t seen) {
  std::fill(h.out.begin(), h.out.end(), C(0));
  std::fill(h.sum.begin(), h.sum.end(), C(0));
  std::fill(h.max.begin(), h.max.end(), C(-INFINITY));
  const int64_t keys_to_see = causal ? std::min(k_length, seen + queries - 1) : k_length;
  for (int64_t first = 0; first < keys_to_see; first += kKeyBlock) {
    const int64_t keys = std::min(kKeyBlock, keys_to_see - first);
    C* const scores = h.scores.data();
    std::fill(scores, scores + queries * kKeyBlock, C(0));
    multiply_add(h.q.data(), dim, h.k_transposed.data() + first, k_length, scores, kKeyBlock, queries, keys, dim);
    for (int64_t i = 0; i < queries; ++i) {
      C* const row = scores + i * kKeyBlock;
      const int64_t visible = causal ? std::clamp(seen + i - first, int64_t{0}, keys) : keys;
      const C max = std::max(h.max[i], max_of(row, visible));
      // What was accumulated before was weighed against the old maximum; at first there is nothing, and old is −inf.
      const C factor = h.max[i] == max ? C(1) : exp_of_nonpositive(h.max[i] - max);
      h.max[i] = max;
      h.sum[i] = h.sum[i] * factor + exp_and_sum(row, row, visible, max);
      std::fill(row + visible, row + keys, C(0));
      for (int64_t d = 0; d < dim; ++d) h.out[i * dim + d] *= factor;
    }
    multiply_add(scores, kKeyBlock, h.v.data() + first * dim, dim, h.out.data(), dim, queries, dim, keys);
  }
}
KF_CPU_CLONES void attend(Head<float>& h, int64_t queries, int64_t k_length, int64_t dim, bool causal, int64_t seen) {
  attend_inline(h, queries, k_length, dim, causal, seen);
}
KF_CPU_CLONES void attend(Head<double>& h, int64_t queries, int64_t k_length, int64_t dim, bool causal, int64_t seen) {
  attend_inline(h, queries, k_length, dim, causal, seen);
}

template <class T>
T* row_of(T* first, const kf::attention::Strides& stride, int64_t batch, int64_t head, int64_t position) {
  return first + batch * stride.batch + head * stride.head + position * stride.seq;
}

}  // namespace

void softmax(const kf::softmax::Args& a) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    using C = compute_t<T>;
    at::parallel_for(0, a.rows, std::max<int64_t>(1, kWork / a.width), [&](int64_t begin, int64_t end) {
      std::vector<C> values(std::is_same_v<T, C> ? 0 : a.width);
      for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(a.x) + row * a.width;
        T* y = static_cast<T*>(a.y) + row * a.width;
        if constexpr (std::is_same_v<T, C>) {
          softmax_row(x, y, a.width);
        } else {  // half types: the row in float beside it
          for (int64_t c = 0; c < a.width; ++c) values[c] = static_cast<C>(x[c]);
          softmax_row(values.data(), values.data(), a.width);
          for (int64_t c = 0; c < a.width; ++c) y[c] = static_cast<T>(values[c]);
        }
      }
    });
  });
}

void attention(const kf::attention::Args& a) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    using C = compute_t<T>;
    const int64_t dim = a.head_dim;
    const int64_t blocks = (a.q_length + kQueryBlock - 1) / kQueryBlock;
    const int64_t grain = std::max<int64_t>(1, kWork / (std::min(kQueryBlock, a.q_length) * a.k_length * dim));
    at::parallel_for(0, a.batch * a.heads * blocks, grain, [&](int64_t begin, int64_t end) {
      Head<C> h{std::vector<C>(dim * a.k_length),  std::vector<C>(a.k_length * dim),
                std::vector<C>(kQueryBlock * dim), std::vector<C>(kQueryBlock * kKeyBlock),
                std::vector<C>(kQueryBlock * dim), std::vector<C>(kQueryBlock),
                std::vector<C>(kQueryBlock)};
      int64_t loaded = -1;
      for (int64_t task = begin; task < end; ++task) {
        const int64_t batch = task / blocks / a.heads;
        const int64_t head = task / blocks % a.heads;
        if (task / blocks != loaded) {  // a thread's tasks are neighbours: mostly of the same head
          loaded = task / blocks;
          for (int64_t j = 0; j < a.k_length; ++j) {
            const T* k = row_of(static_cast<const T*>(a.k), a.k_stride, batch, head, j);
            const T* v = row_of(static_cast<const T*>(a.v), a.v_stride, batch, head, j);
            for (int64_t d = 0; d < dim; ++d) h.k_transposed[d * a.k_length + j] = static_cast<C>(k[d]);
            for (int64_t d = 0; d < dim; ++d) h.v[j * dim + d] = static_cast<C>(v[d]);
          }
        }
        const int64_t first = task % blocks * kQueryBlock;
        const int64_t queries = std::min(kQueryBlock, a.q_length - first);
        for (int64_t i = 0; i < queries; ++i) {
          const T* q = row_of(static_cast<const T*>(a.q), a.q_stride, batch, head, first + i);
          for (int64_t d = 0; d < dim; ++d) h.q[i * dim + d] = static_cast<C>(q[d]) * static_cast<C>(a.scale);
        }
        attend(h, queries, a.k_length, dim, a.causal, first + a.k_length - a.q_length + 1);
        for (int64_t i = 0; i < queries; ++i) {
          T* out = row_of(static_cast<T*>(a.out), a.out_stride, batch, head, first + i);
          const C inverse = h.sum[i] == 0 ? C(0) : 1 / h.sum[i];  // 0: a query that sees no key
          for (int64_t d = 0; d < dim; ++d) out[d] = static_cast<T>(h.out[i * dim + d] * inverse);
        }
      }
    });
  });
}

}  // namespace kf::cpu
