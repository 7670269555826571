// The same ops in plain C++: what each kernel must compute. Attention is blocked like v2_tiled, for the same reason:
// what is used again should still be near.
#include "attention_cpu.h"

#include <kf/cpu.h>
#include <step2/vectorised_cpu.h>

#include <vector>

namespace kf::cpu {
namespace {

constexpr int64_t kWork = 1 << 15;   // multiplications below which a second thread costs more than it brings
constexpr int64_t kQueryBlock = 48;  // queries that read a block of keys while it is in cache
constexpr int64_t kKeyBlock = 256;

// ---- softmax ----

template <class C>
KF_CPU_INLINE void softmax_inline(const C* x, C* y, int64_t width) {
  const C inverse = 1 / exp_and_sum(x, y, width, max_of(x, width));
  for (int64_t c = 0; c < width; ++c) y[c] *= inverse;
}
KF_CPU_CLONES void softmax_row(const float* x, float* y, int64_t width) { softmax_inline(x, y, width); }
KF_CPU_CLONES void softmax_row(const double* x, double* y, int64_t width) { softmax_inline(x, y, width); }

// ---- attention ----

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
  int64_t dim, v_stride;

  Head(int64_t k_length, int64_t dim)
      : k_transposed((k_length + kKeyBlock - 1) / kKeyBlock * kKeyBlock * dim),
        v(k_length * padded(dim)),
        q(kQueryBlock * dim),
        scores(kQueryBlock * kKeyBlock),
        out(kQueryBlock * padded(dim)),
        max(kQueryBlock),
        sum(kQueryBlock),
        dim(dim),
        v_stride(padded(dim)) {}

  static constexpr int64_t kPadding = 64 / sizeof(C);  // a register of AVX-512
  static int64_t padded(int64_t n) { return (n + kPadding - 1) / kPadding * kPadding; }
};

// `queries` queries against the keys from `begin` to `end`. Query i sees those before `seen` + i.
struct Block {
  int64_t queries, begin, end, seen;
};

// kRows × kVectors registers of kBytes hold what a product adds up: most of those that the machine has, and few enough
// that a row of the other factor finds room as well.
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
      h.sum[i] = h.sum[i] * factor + exp_and_sum(row + missing, row + missing, visible, max);
      std::fill(row, row + missing, C(0));
      std::fill(row + missing + visible, row + keys, C(0));
      C* const out = h.out.data() + i * width;
      for (int64_t d = 0; d < width; ++d) out[d] *= factor;
    }
    multiply_add<kRows, kVectors, kBytes>(scores, kKeyBlock, h.v.data() + first * width, width, h.out.data(), width,
                                          rows, h.dim, keys);
  }
}

#if defined(__x86_64__) && defined(__GNUC__)
// 32 registers of 64 bytes, 16 of 32, 16 of 16: so each has its own tile, which KF_CPU_CLONES could not give it.
template <class C>
__attribute__((target("arch=x86-64-v4"))) void attend_v4(Head<C>& h, const Block& block) {
  attend_inline<6, 4, 64>(h, block);
}
template <class C>
__attribute__((target("arch=x86-64-v3"))) void attend_v3(Head<C>& h, const Block& block) {
  attend_inline<6, 2, 32>(h, block);
}
template <class C>
void attend(Head<C>& h, const Block& block) {
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    attend_v4(h, block);
  } else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    attend_v3(h, block);
  } else {
    attend_inline<6, 2, 16>(h, block);
  }
}
#else
template <class C>
void attend(Head<C>& h, const Block& block) {
  attend_inline<6, 4, 16>(h, block);  // 32 registers of 16 bytes, as aarch64 has
}
#endif

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
      Head<C> h(a.k_length, dim);
      int64_t loaded = -1;
      for (int64_t task = begin; task < end; ++task) {
        const int64_t batch = task / blocks / a.heads;
        const int64_t head = task / blocks % a.heads;
        const int64_t kv_head = head / (a.heads / a.kv_heads);
        const int64_t key_begin = a.key_begin == nullptr ? 0 : std::max<int64_t>(0, a.key_begin[batch]);
        const int64_t key_end = a.key_end == nullptr ? a.k_length : std::min<int64_t>(a.k_length, a.key_end[batch]);
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
        const int64_t first = task % blocks * kQueryBlock;
        const int64_t queries = std::min(kQueryBlock, a.q_length - first);
        for (int64_t i = 0; i < queries; ++i) {
          const T* q = row_of(static_cast<const T*>(a.q), a.q_stride, batch, head, first + i);
          for (int64_t d = 0; d < dim; ++d) h.q[i * dim + d] = static_cast<C>(q[d]) * static_cast<C>(a.scale);
        }
        const int64_t seen = a.causal ? first + a.k_length - a.q_length + 1 : a.k_length;
        attend(h, {queries, key_begin, key_end, seen});
        for (int64_t i = 0; i < queries; ++i) {
          T* out = row_of(static_cast<T*>(a.out), a.out_stride, batch, head, first + i);
          const C inverse = h.sum[i] == 0 ? C(0) : 1 / h.sum[i];  // 0: a query that sees no key
          for (int64_t d = 0; d < dim; ++d) out[d] = static_cast<T>(h.out[i * h.v_stride + d] * inverse);
          static_cast<C*>(a.lse)[(batch * a.heads + head) * a.q_length + first + i] = h.max[i] + std::log(h.sum[i]);
        }
      }
    });
  });
}

}  // namespace kf::cpu
