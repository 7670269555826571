// The same ops in plain C++: what each kernel must compute. Attention is blocked like v2_tiled, for the same reason:
// what is used again should still be near.
#include "cpu/attention_cpu.h"

#include <kf/cpu.h>
#include <step2/dropout_cpu.h>
#include <step2/vectorised_cpu.h>

#include <algorithm>
#include <vector>

namespace kf::cpu {
namespace {

constexpr int64_t kWork = 1 << 15;   // multiplications below which a second thread costs more than it brings
constexpr int64_t kQueryBlock = 48;  // queries that read a block of keys while it is in cache
constexpr int64_t kKeyBlock = 256;

// ---- softmax ----

// How many columns a row sees, the first ones.
template <class Args>
int64_t columns_seen(const Args& a, int64_t row) {
  const int64_t last = row % a.q_length + a.width - a.q_length;  // that the mask leaves
  return a.causal ? std::max<int64_t>(0, last + 1) : a.width;
}

template <class C>
KF_CPU_INLINE void softmax_inline(const C* x, C* y, int64_t width, C scale) {
  if (scale != 1) {
    for (int64_t c = 0; c < width; ++c) y[c] = x[c] * scale;
    x = y;
  }
  const C inverse = 1 / exp_and_sum(x, y, width, max_of(x, width));
  for (int64_t c = 0; c < width; ++c) y[c] *= inverse;
}
KF_CPU_CLONES void softmax_row(const float* x, float* y, int64_t width, float scale) {
  softmax_inline(x, y, width, scale);
}
KF_CPU_CLONES void softmax_row(const double* x, double* y, int64_t width, double scale) {
  softmax_inline(x, y, width, scale);
}

// ---- softmax_backward ----

template <class C>
KF_CPU_INLINE void softmax_backward_inline(const C* grad, const C* y, C* grad_x, int64_t width, C scale) {
  const C sum = dot(grad, y, width);
  for (int64_t c = 0; c < width; ++c) grad_x[c] = scale * (y[c] * (grad[c] - sum));
}
KF_CPU_CLONES void softmax_backward_row(const float* grad, const float* y, float* grad_x, int64_t width, float scale) {
  softmax_backward_inline(grad, y, grad_x, width, scale);
}
KF_CPU_CLONES void softmax_backward_row(const double* grad, const double* y, double* grad_x, int64_t width,
                                        double scale) {
  softmax_backward_inline(grad, y, grad_x, width, scale);
}

// ---- attention ----

// What to subtract from scores, the greatest of which is `max`. Where that is −∞ all weights are 0: exp(−∞ − 0) is, and
// exp(−∞ + ∞) would be NaN.
template <class C>
KF_CPU_INLINE C finite(C max) {
  return max == C(-INFINITY) ? C(0) : max;
}

// What one thread holds of the head it works on, and of its block of queries. Rows are padded to whole registers.
template <class C>
struct Head {
  // [Sk/key block, D, key block]: so that one query's scores for neighbouring keys are neighbours. Not [D, Sk], whose
  // rows, 4096 bytes apart at Sk 1024, would all want the same few places of the cache.
  std::vector<C> k_transposed;
  std::vector<C> v;         // [Sk, D]
  std::vector<C> q;         // [query block, D], times scale
  std::vector<C> scores;    // [query block, key block]
  std::vector<C> out;       // [query block, D]
  std::vector<C> max, sum;  // [query block]
  std::vector<C> factors;   // [key block]: dropout's
  int64_t dim, v_stride;

  Head(int64_t k_length, int64_t dim)
      : k_transposed((k_length + kKeyBlock - 1) / kKeyBlock * kKeyBlock * dim),
        v(k_length * padded<C>(dim)),
        q(kQueryBlock * dim),
        scores(kQueryBlock * kKeyBlock),
        out(kQueryBlock * padded<C>(dim)),
        max(kQueryBlock),
        sum(kQueryBlock),
        factors(kKeyBlock),
        dim(dim),
        v_stride(padded<C>(dim)) {}
};

// `queries` queries of a head of all batches, from `first` on, against the keys from `begin` to `end`. Query i of them
// sees those before `seen` + i.
struct Block {
  const kf::attention::Args& args;
  int64_t head, first, queries, begin, end, seen;
};

template <int kRows, int kVectors, int kBytes, class C>
KF_CPU_INLINE void attend_inline(Head<C>& h, const Block& block) {
  static_assert(kQueryBlock % kRows == 0);
  const int64_t width = h.v_stride;
  const int64_t rows = (block.queries + kRows - 1) / kRows * kRows;
  std::fill(h.out.begin(), h.out.end(), C(0));
  std::fill(h.sum.begin(), h.sum.end(), C(0));
  std::fill(h.max.begin(), h.max.end(), C(-INFINITY));
  const int64_t end = std::min(block.end, block.seen + block.queries - 1);
  if (block.begin >= end) return;
  for (int64_t first = block.begin / kKeyBlock * kKeyBlock; first < end; first += kKeyBlock) {
    const int64_t missing = std::max<int64_t>(0, block.begin - first);
    const int64_t keys = std::min(kKeyBlock, end - first);
    C* const scores = h.scores.data();
    std::fill(scores, scores + rows * kKeyBlock, C(0));
    multiply_add<kRows, kVectors, kBytes>(h.q.data(), h.dim, h.k_transposed.data() + first * h.dim, kKeyBlock, scores,
                                          kKeyBlock, rows, keys, h.dim);
    for (int64_t i = 0; i < block.queries; ++i) {
      C* const row = scores + i * kKeyBlock;
      const int64_t visible = std::clamp(block.seen + i - first, missing, keys) - missing;
      const C max = std::max(h.max[i], max_of(row + missing, visible));
      // What was accumulated before was weighed against the old maximum; at first there is nothing, and old is −inf.
      const C factor = h.max[i] == max ? C(1) : exp_of_nonpositive(h.max[i] - max);
      h.max[i] = max;
      h.sum[i] = h.sum[i] * factor + exp_and_sum(row + missing, row + missing, visible, finite(max));
      if (block.args.threshold != 0) {  // after the sum, which dropped weights count in
        dropout_factors(block.args, block.head, block.first + i, first + missing, visible, h.factors.data());
        for (int64_t j = 0; j < visible; ++j) row[missing + j] *= h.factors[j];
      }
      std::fill(row + missing + visible, row + keys, C(0));
      C* const out = h.out.data() + i * width;
      for (int64_t d = 0; d < width; ++d) out[d] *= factor;
    }
    // Without the keys before the first one: their values may be NaN, and 0 times that is, too.
    multiply_add<kRows, kVectors, kBytes>(scores + missing, kKeyBlock, h.v.data() + (first + missing) * width, width,
                                          h.out.data(), width, rows, h.dim, keys - missing);
  }
}

template <class C>
struct Attend {
  Head<C>& h;
  const Block& block;

  template <int kRows, int kVectors, int kBytes>
  KF_CPU_INLINE void run() const {
    attend_inline<kRows, kVectors, kBytes>(h, block);
  }
};

// ---- decode ----

constexpr int64_t kParts = 16;  // in which a dot product is added up: see vectorised_cpu.h

// Scores of `keys` keys that lie `stride` apart.
template <class T, class C>
KF_CPU_INLINE void score_inline(const C* q, const T* k, int64_t stride, int64_t keys, int64_t dim, C* score) {
  for (int64_t key = 0; key < keys; ++key, k += stride) {
    C part[kParts] = {};
    int64_t d = 0;
    for (; d + kParts <= dim; d += kParts) {
      for (int64_t l = 0; l < kParts; ++l) part[l] += q[d + l] * static_cast<C>(k[d + l]);
    }
    for (; d < dim; ++d) part[0] += q[d] * static_cast<C>(k[d]);
    score[key] = sum_of(part);
  }
}

// Adds the values of these keys to `out`, each by its weight.
template <class T, class C>
KF_CPU_INLINE void weigh_inline(const C* weight, const T* v, int64_t stride, int64_t keys, int64_t dim, C* out) {
  for (int64_t key = 0; key < keys; ++key, v += stride) {
    for (int64_t d = 0; d < dim; ++d) out[d] += weight[key] * static_cast<C>(v[d]);
  }
}

// Compiled for several machines, which a template cannot be.
KF_CPU_CLONES void score(const float* q, const float* k, int64_t stride, int64_t keys, int64_t dim, float* to) {
  score_inline(q, k, stride, keys, dim, to);
}
KF_CPU_CLONES void weigh(const float* by, const float* v, int64_t stride, int64_t keys, int64_t dim, float* out) {
  weigh_inline(by, v, stride, keys, dim, out);
}
KF_CPU_CLONES void score(const double* q, const double* k, int64_t stride, int64_t keys, int64_t dim, double* to) {
  score_inline(q, k, stride, keys, dim, to);
}
KF_CPU_CLONES void weigh(const double* by, const double* v, int64_t stride, int64_t keys, int64_t dim, double* out) {
  weigh_inline(by, v, stride, keys, dim, out);
}
KF_CPU_CLONES void score(const float* q, const Half* k, int64_t stride, int64_t keys, int64_t dim, float* to) {
  score_inline(q, k, stride, keys, dim, to);
}
KF_CPU_CLONES void weigh(const float* by, const Half* v, int64_t stride, int64_t keys, int64_t dim, float* out) {
  weigh_inline(by, v, stride, keys, dim, out);
}
KF_CPU_CLONES void score(const float* q, const BFloat16* k, int64_t stride, int64_t keys, int64_t dim, float* to) {
  score_inline(q, k, stride, keys, dim, to);
}
KF_CPU_CLONES void weigh(const float* by, const BFloat16* v, int64_t stride, int64_t keys, int64_t dim, float* out) {
  weigh_inline(by, v, stride, keys, dim, out);
}

}  // namespace

KeyRange keys_of(const kf::attention::Args& a, int64_t batch) {
  return {a.key_begin == nullptr ? 0 : std::clamp<int64_t>(a.key_begin[batch], 0, a.k_length),
          a.key_end == nullptr ? a.k_length : std::min<int64_t>(a.k_length, a.key_end[batch])};
}

Document document_of(const kf::attention::Args& a, int64_t query, const KeyRange& keys) {
  if (a.cu_seqlens == nullptr) return {{0, a.q_length}, keys, a.k_length - a.q_length};
  // The last one that begins at the query or before it: any other such one is empty, or ends before it.
  const int64_t d = std::upper_bound(a.cu_seqlens, a.cu_seqlens + a.documents, query) - a.cu_seqlens - 1;
  const KeyRange queries{a.cu_seqlens[d], a.cu_seqlens[d + 1]}, own{a.cu_seqlens_k[d], a.cu_seqlens_k[d + 1]};
  return {queries, own, own.end - queries.end};
}

void softmax(const kf::softmax::Args& a) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    using C = compute_t<T>;
    const C scale = static_cast<C>(a.scale);
    parallel_for(0, a.rows, std::max<int64_t>(1, kWork / a.width), [&](int64_t begin, int64_t end) {
      std::vector<C> values(std::is_same_v<T, C> ? 0 : a.width);
      for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(a.x) + row * a.width;
        T* y = static_cast<T*>(a.y) + row * a.width;
        const int64_t seen = columns_seen(a, row);
        if constexpr (std::is_same_v<T, C>) {
          softmax_row(x, y, seen, scale);
        } else {  // half types: the row in float beside it
          for (int64_t c = 0; c < seen; ++c) values[c] = static_cast<C>(x[c]);
          softmax_row(values.data(), values.data(), seen, scale);
          for (int64_t c = 0; c < seen; ++c) y[c] = static_cast<T>(values[c]);
        }
        std::fill(y + seen, y + a.width, T(0));
      }
    });
  });
}

void softmax_backward(const kf::softmax_backward::Args& a) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    using C = compute_t<T>;
    const C scale = static_cast<C>(a.scale);
    parallel_for(0, a.rows, std::max<int64_t>(1, kWork / a.width), [&](int64_t begin, int64_t end) {
      const int64_t beside = std::is_same_v<T, C> ? 0 : a.width;
      std::vector<C> grads(beside), weights(beside);
      for (int64_t row = begin; row < end; ++row) {
        const T* grad = static_cast<const T*>(a.grad) + row * a.width;
        const T* y = static_cast<const T*>(a.y) + row * a.width;
        T* grad_x = static_cast<T*>(a.grad_x) + row * a.width;
        const int64_t seen = columns_seen(a, row);
        if constexpr (std::is_same_v<T, C>) {
          softmax_backward_row(grad, y, grad_x, seen, scale);
        } else {  // half types: both rows in float beside them
          for (int64_t c = 0; c < seen; ++c) grads[c] = static_cast<C>(grad[c]);
          for (int64_t c = 0; c < seen; ++c) weights[c] = static_cast<C>(y[c]);
          softmax_backward_row(grads.data(), weights.data(), grads.data(), seen, scale);
          for (int64_t c = 0; c < seen; ++c) grad_x[c] = static_cast<T>(grads[c]);
        }
        std::fill(grad_x + seen, grad_x + a.width, T(0));
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
    parallel_for(0, a.batch * a.heads * blocks, grain, [&](int64_t begin, int64_t end) {
      Head<C> h(a.k_length, dim);
      int64_t loaded = -1;
      for (int64_t task = begin; task < end; ++task) {
        const int64_t batch = task / blocks / a.heads;
        const int64_t head = task / blocks % a.heads;
        const int64_t kv_head = head / (a.heads / a.kv_heads);
        const auto [key_begin, key_end] = keys_of(a, batch);
        if (batch * a.kv_heads + kv_head != loaded) {  // a thread's tasks are neighbours: mostly of the same head
          loaded = batch * a.kv_heads + kv_head;
          for (int64_t j = key_begin; j < key_end; ++j) {
            const T* k = row_of(static_cast<const T*>(a.k), a.k_stride, batch, kv_head, j);
            const T* v = row_of(static_cast<const T*>(a.v), a.v_stride, batch, kv_head, j);
            for (int64_t d = 0; d < dim; ++d)
              h.k_transposed[(j / kKeyBlock * dim + d) * kKeyBlock + j % kKeyBlock] = static_cast<C>(k[d]);
            for (int64_t d = 0; d < dim; ++d) h.v[j * h.v_stride + d] = static_cast<C>(v[d]);
          }
        }
        // A block of queries; of a packed row, a document's part of it after the other.
        const int64_t block_end = std::min((task % blocks + 1) * kQueryBlock, a.q_length);
        for (int64_t first = task % blocks * kQueryBlock, queries; first < block_end; first += queries) {
          const Document document = document_of(a, first, {key_begin, key_end});
          queries = std::min(block_end, document.queries.end) - first;
          for (int64_t i = 0; i < queries; ++i) {
            const T* q = row_of(static_cast<const T*>(a.q), a.q_stride, batch, head, first + i);
            for (int64_t d = 0; d < dim; ++d) h.q[i * dim + d] = static_cast<C>(q[d]) * static_cast<C>(a.scale);
          }
          const auto [begin_seen, end_seen] = document.keys;
          const int64_t seen = a.causal ? first + document.diagonal + 1 : a.k_length;
          with_registers(Attend<C>{h, {a, batch * a.heads + head, first, queries, begin_seen, end_seen, seen}});
          for (int64_t i = 0; i < queries; ++i) {
            T* out = row_of(static_cast<T*>(a.out), a.out_stride, batch, head, first + i);
            const C inverse = h.sum[i] == 0 ? C(0) : 1 / h.sum[i];  // 0: a query that sees no key
            for (int64_t d = 0; d < dim; ++d) out[d] = static_cast<T>(h.out[i * h.v_stride + d] * inverse);
            static_cast<C*>(a.lse)[(batch * a.heads + head) * a.q_length + first + i] = h.max[i] + std::log(h.sum[i]);
          }
        }
      }
    });
  });
}

// One query is no matrix product: each key is read once, for a dot product, and each value once, for a sum. Keys that
// several queries share are read by each, from the cache.
void attention_decode(const kf::attention_decode::Args& a) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    using C = compute_t<T>;
    const int64_t dim = a.head_dim;
    const int64_t grain = std::max<int64_t>(1, kWork / (a.q_length * a.k_length * dim));
    parallel_for(0, a.batch * a.heads, grain, [&](int64_t first_head, int64_t last_head) {
      std::vector<C> q(dim), out(dim), weights(a.k_length);
      for (int64_t task = first_head; task < last_head; ++task) {
        const int64_t batch = task / a.heads, head = task % a.heads, kv_head = head / (a.heads / a.kv_heads);
        const KeyRange keys = keys_of(a, batch);
        // Calls f(page, first key in it, first key, how many) for each page that has some of the keys before `end`.
        const auto each_page = [&](int64_t end, auto f) {
          for (int64_t key = keys.begin; key < end;) {
            const int64_t logical_page = key / a.block_size,
                          page_end = std::min(end, (logical_page + 1) * a.block_size);
            f(a.block_table == nullptr ? batch : a.block_table[batch * a.table_stride + logical_page],
              key % a.block_size, key, page_end - key);
            key = page_end;
          }
        };
        for (int64_t query = 0; query < a.q_length; ++query) {
          const int64_t end = keys.end - (a.q_length - 1 - query);
          const int64_t seen = std::max<int64_t>(0, end - keys.begin);
          const T* q_row = row_of(static_cast<const T*>(a.q), a.q_stride, batch, head, query);
          for (int64_t d = 0; d < dim; ++d) q[d] = static_cast<C>(q_row[d]) * static_cast<C>(a.scale);
          each_page(end, [&](int64_t page, int64_t row, int64_t key, int64_t n) {
            const T* k = row_of(static_cast<const T*>(a.k), a.k_stride, page, kv_head, row);
            score(q.data(), k, a.k_stride.seq, n, dim, weights.data() + key);
          });
          C* const own = weights.data() + keys.begin;
          const C max = max_of(own, seen);
          const C sum = exp_and_sum(own, own, seen, finite(max));
          std::fill(out.begin(), out.end(), C(0));
          each_page(end, [&](int64_t page, int64_t row, int64_t key, int64_t n) {
            const T* v = row_of(static_cast<const T*>(a.v), a.v_stride, page, kv_head, row);
            weigh(weights.data() + key, v, a.v_stride.seq, n, dim, out.data());
          });
          const C inverse = sum == 0 ? C(0) : 1 / sum;  // 0: a query that sees no key
          T* to = row_of(static_cast<T*>(a.out), a.out_stride, batch, head, query);
          for (int64_t d = 0; d < dim; ++d) to[d] = static_cast<T>(out[d] * inverse);
          static_cast<C*>(a.lse)[task * a.q_length + query] = max + std::log(sum);
        }
      }
    });
  });
}

}  // namespace kf::cpu
