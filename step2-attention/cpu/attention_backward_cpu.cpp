// attention_backward in plain C++: what its kernels must compute. Blocked and vectorised as attention_cpu.cpp is; no
// memory grows with Sq·Sk.
#include <kf/cpu.h>
#include <step2/dropout_cpu.h>
#include <step2/vectorised_cpu.h>

#include <algorithm>
#include <vector>

#include "cpu/attention_cpu.h"

namespace kf::cpu {
namespace {

constexpr int64_t kQueryBlock = 96;  // queries that read a block of keys while it is in cache
constexpr int64_t kKeyBlock = 258;   // a multiple of kRegisterRows, as kQueryBlock is
static_assert(kQueryBlock % kRegisterRows == 0 && kKeyBlock % kRegisterRows == 0);
constexpr int64_t kWeightStride = padded<float>(kKeyBlock);  // of a query's weights

// What a thread holds of a head of k and v, and of a block of queries. Rows are padded to whole registers.
template <class C>
struct Head {
  // [Sk/key block, D, weight stride], so that one query's scores for neighbouring keys are neighbours.
  std::vector<C> k_transposed, v_transposed;
  std::vector<C> k, dk, dv;                                 // [Sk, D], rows up to a whole block
  std::vector<C> q, grad, dq;                               // [query block, D]
  std::vector<C> weight, grad_score;                        // [query block, key block]: first scores, and grad·v
  std::vector<C> weight_transposed, grad_score_transposed;  // [key block, query block]
  std::vector<C> lse, delta;                                // [query block]
  std::vector<C> factors;                                   // [key block]: dropout's
  int64_t dim, stride;

  Head(int64_t k_length, int64_t dim)
      : k_transposed(blocks(k_length) * kWeightStride * dim),
        v_transposed(k_transposed.size()),
        k(blocks(k_length) * kKeyBlock * padded<C>(dim)),
        dk(k.size()),
        dv(k.size()),
        q(kQueryBlock * padded<C>(dim)),
        grad(q.size()),
        dq(q.size()),
        weight(kQueryBlock * kWeightStride),
        grad_score(weight.size()),
        weight_transposed(kKeyBlock * kQueryBlock),
        grad_score_transposed(weight_transposed.size()),
        lse(kQueryBlock),
        delta(kQueryBlock),
        factors(kKeyBlock),
        dim(dim),
        stride(padded<C>(dim)) {}

  static int64_t blocks(int64_t k_length) { return (k_length + kKeyBlock - 1) / kKeyBlock; }
};

// `queries` queries of a head of all batches, from `first` on, and the keys from `begin` to `end`. Query i of them sees
// those before `seen` + i. Keys are counted from `origin`.
struct Block {
  const kf::attention::Args& args;
  int64_t head, first, queries, origin, begin, end, seen;
};

// Adds what a block of queries contributes: to its own dq, and to all keys' dk and dv.
template <class C>
struct Contribute {
  Head<C>& h;
  Block block;
  C scale;

  template <int kRows, int kVectors, int kBytes>
  KF_CPU_INLINE void run() const {
    const auto product = [&](const C* a, int64_t a_stride, const C* b, int64_t b_stride, C* c, int64_t c_stride,
                             int64_t m, int64_t n, int64_t k) __attribute__((always_inline)) {
      multiply_add<kRows, kVectors, kBytes>(a, a_stride, b, b_stride, c, c_stride, m, n, k);
    };
    const int64_t rows = (block.queries + kRows - 1) / kRows * kRows;
    const int64_t dim = h.dim, stride = h.stride;
    std::fill(h.dq.begin(), h.dq.end(), C(0));
    const int64_t end = std::min(block.end, block.seen + block.queries - 1);
    if (block.begin >= end) return;
    for (int64_t first = block.begin / kKeyBlock * kKeyBlock; first < end; first += kKeyBlock) {
      const int64_t missing = std::max<int64_t>(0, block.begin - first);
      const int64_t keys = std::min(kKeyBlock, end - first);
      const int64_t key_rows = (keys + kRows - 1) / kRows * kRows;
      std::fill(h.weight.begin(), h.weight.end(), C(0));
      std::fill(h.grad_score.begin(), h.grad_score.end(), C(0));
      const int64_t block_at = first / kKeyBlock * dim * kWeightStride;
      product(h.q.data(), stride, h.k_transposed.data() + block_at, kWeightStride, h.weight.data(), kWeightStride, rows,
              keys, dim);
      product(h.grad.data(), stride, h.v_transposed.data() + block_at, kWeightStride, h.grad_score.data(),
              kWeightStride, rows, keys, dim);
      for (int64_t i = 0; i < rows; ++i) {
        C* const weight = h.weight.data() + i * kWeightStride;
        C* const grad_score = h.grad_score.data() + i * kWeightStride;
        const int64_t see = i < block.queries ? std::clamp(block.seen + i - first, missing, keys) : missing;
        const C lse = h.lse[i], delta = h.delta[i];
        if (block.args.threshold == 0) {
          for (int64_t j = missing; j < see; ++j) {
            weight[j] = exp_of_nonpositive(weight[j] * scale - lse);
            grad_score[j] = weight[j] * (grad_score[j] - delta);
          }
        } else if (missing < see) {
          const int64_t key = block.origin + first + missing;
          dropout_factors(block.args, block.head, block.first + i, key, see - missing, h.factors.data());
          for (int64_t j = missing; j < see; ++j) {
            weight[j] = exp_of_nonpositive(weight[j] * scale - lse);
            const C factor = h.factors[j - missing];
            grad_score[j] = weight[j] * (factor * grad_score[j] - delta);
            weight[j] *= factor;  // as v met it
          }
        }
        for (C* row : {weight, grad_score}) {
          std::fill(row, row + missing, C(0));
          std::fill(row + see, row + key_rows, C(0));
        }
      }
      for (int64_t j = 0; j < key_rows; ++j) {
        for (int64_t i = 0; i < block.queries; ++i) {
          h.weight_transposed[j * kQueryBlock + i] = h.weight[i * kWeightStride + j];
          h.grad_score_transposed[j * kQueryBlock + i] = h.grad_score[i * kWeightStride + j];
        }
      }
      product(h.grad_score.data(), kWeightStride, h.k.data() + first * stride, stride, h.dq.data(), stride, rows, dim,
              keys);
      product(h.grad_score_transposed.data(), kQueryBlock, h.q.data(), stride, h.dk.data() + first * stride, stride,
              key_rows, dim, block.queries);
      product(h.weight_transposed.data(), kQueryBlock, h.grad.data(), stride, h.dv.data() + first * stride, stride,
              key_rows, dim, block.queries);
    }
  }
};

template <class T, class C>
void load_keys(Head<C>& h, const kf::attention_backward::Args& a, int64_t batch, int64_t kv_head, int64_t origin,
               const KeyRange& keys, int64_t k_length) {
  const int64_t used = h.blocks(k_length) * kKeyBlock * h.stride;
  std::fill_n(h.dk.begin(), used, C(0));
  std::fill_n(h.dv.begin(), used, C(0));
  // Of the first block, what is not there weighs 0; and 0 times what another head left would be NaN if that was
  // infinite.
  if (keys.begin < keys.end) {
    std::fill(h.k.begin() + keys.begin / kKeyBlock * kKeyBlock * h.stride, h.k.begin() + keys.begin * h.stride, C(0));
  }
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    const T* k = row_of(static_cast<const T*>(a.k), a.k_stride, batch, kv_head, origin + j);
    const T* v = row_of(static_cast<const T*>(a.v), a.v_stride, batch, kv_head, origin + j);
    const int64_t at = j / kKeyBlock * h.dim * kWeightStride + j % kKeyBlock;
    for (int64_t d = 0; d < h.dim; ++d) h.k[j * h.stride + d] = static_cast<C>(k[d]);
    for (int64_t d = 0; d < h.dim; ++d) h.k_transposed[at + d * kWeightStride] = static_cast<C>(k[d]);
    for (int64_t d = 0; d < h.dim; ++d) h.v_transposed[at + d * kWeightStride] = static_cast<C>(v[d]);
  }
}

template <class T, class C>
void load_queries(Head<C>& h, const kf::attention_backward::Args& a, int64_t batch, int64_t head, int64_t first,
                  int64_t queries) {
  for (int64_t i = 0; i < queries; ++i) {
    const T* q = row_of(static_cast<const T*>(a.q), a.q_stride, batch, head, first + i);
    const T* out = row_of(static_cast<const T*>(a.out), a.out_stride, batch, head, first + i);
    const T* grad = row_of(static_cast<const T*>(a.grad), a.grad_stride, batch, head, first + i);
    const int64_t query = (batch * a.heads + head) * a.q_length + first + i;
    const C lse = static_cast<const C*>(a.lse)[query];
    h.lse[i] = lse == -INFINITY ? C(INFINITY) : lse;
    if (lse == -INFINITY) {  // sees no key: it may be padding, and hold NaN, which a weight of 0 would not make 0
      std::fill_n(h.q.data() + i * h.stride, h.dim, C(0));
      std::fill_n(h.grad.data() + i * h.stride, h.dim, C(0));
      h.delta[i] = 0;
      continue;
    }
    C delta = a.grad_lse == nullptr ? C(0) : -static_cast<const C*>(a.grad_lse)[query];
    for (int64_t d = 0; d < h.dim; ++d) {
      h.q[i * h.stride + d] = static_cast<C>(q[d]);
      h.grad[i * h.stride + d] = static_cast<C>(grad[d]);
      delta += static_cast<C>(grad[d]) * static_cast<C>(out[d]);
    }
    h.delta[i] = delta;
  }
}

}  // namespace

// A thread owns a head of k and v, or a document's part of one, with all heads of q that read it: dk and dv are added
// up by one thread, in order. A document's keys are counted from its first, so what it does not see is not there.
void attention_backward(const kf::attention_backward::Args& a) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    using C = compute_t<T>;
    const int64_t group = a.heads / a.kv_heads, documents = a.cu_seqlens == nullptr ? 1 : a.documents;
    parallel_for(0, a.batch * a.kv_heads * documents, 1, [&](int64_t begin, int64_t end) {
      Head<C> h(a.k_length, a.head_dim);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t batch = task / documents / a.kv_heads, kv_head = task / documents % a.kv_heads;
        KeyRange queries{0, a.q_length}, keys = keys_of(a, batch);
        int64_t origin = 0, k_length = a.k_length;
        if (a.cu_seqlens != nullptr) {
          const int32_t *start = a.cu_seqlens + task % documents, *key_start = a.cu_seqlens_k + task % documents;
          queries = {start[0], start[1]};
          origin = key_start[0], k_length = key_start[1] - origin;
          keys = {0, k_length};
        }
        load_keys<T>(h, a, batch, kv_head, origin, keys, k_length);
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
          for (int64_t first = queries.begin; first < queries.end; first += kQueryBlock) {
            const int64_t rows = std::min(kQueryBlock, queries.end - first);
            load_queries<T>(h, a, batch, head, first, rows);
            const int64_t seen = a.causal ? first + k_length - queries.end + 1 : k_length;
            const Block block{a, batch * a.heads + head, first, rows, origin, keys.begin, keys.end, seen};
            with_registers(Contribute<C>{h, block, static_cast<C>(a.scale)});
            for (int64_t i = 0; i < rows; ++i) {
              T* dq = row_of(static_cast<T*>(a.dq), a.dq_stride, batch, head, first + i);
              for (int64_t d = 0; d < h.dim; ++d)
                dq[d] = static_cast<T>(h.dq[i * h.stride + d] * static_cast<C>(a.scale));
            }
          }
        }
        for (int64_t j = 0; j < k_length; ++j) {
          T* dk = row_of(static_cast<T*>(a.dk), a.dk_stride, batch, kv_head, origin + j);
          T* dv = row_of(static_cast<T*>(a.dv), a.dv_stride, batch, kv_head, origin + j);
          for (int64_t d = 0; d < h.dim; ++d) dk[d] = static_cast<T>(h.dk[j * h.stride + d] * static_cast<C>(a.scale));
          for (int64_t d = 0; d < h.dim; ++d) dv[d] = static_cast<T>(h.dv[j * h.stride + d]);
        }
      }
    });
  });
}

}  // namespace kf::cpu
