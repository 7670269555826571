// The three inner loops of this step's plain C++ versions: a matrix product, softmax, a row's statistics.
//
// Written with the compiler's vector type (GCC and clang have it): `Pack` is 32 bytes of C, and + and * work on all of
// them at once. KF_CPU_CLONES: see step1/vectorised_cpu.h.
#pragma once

#include <step2/vectorised_cpu.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace kf::cpu {

template <class C>
struct PackOf {
  typedef C type __attribute__((vector_size(32), aligned(alignof(C)), may_alias));
};
template <class C>
using Pack = typename PackOf<C>::type;
template <class C>
constexpr int kPackLanes = 32 / sizeof(C);

template <class C>
KF_CPU_INLINE Pack<C>& pack_at(C* p) {
  return *reinterpret_cast<Pack<C>*>(p);
}
template <class C>
KF_CPU_INLINE const Pack<C>& pack_at(const C* p) {
  return *reinterpret_cast<const Pack<C>*>(p);
}

// A matrix: element (i, j) lies at data + i·row + j·column.
template <class C>
struct Matrix {
  C* data;
  int64_t row;
  int64_t column = 1;
};

// out[i, j] += Σ_k a[i, k] · b[k, j] for kRows rows and kPacks packs of columns. All sums stay in registers.
template <int kRows, int kPacks, class C>
KF_CPU_INLINE void multiply_tile(Matrix<const C> a, Matrix<const C> b, C* out, int64_t out_row, int64_t depth) {
  Pack<C> sum[kRows][kPacks] = {};
  for (int64_t k = 0; k < depth; ++k) {
    const C* from = b.data + k * b.row;
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kPacks; ++j) {
        sum[i][j] += a.data[i * a.row + k * a.column] * pack_at(from + j * kPackLanes<C>);
      }
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kPacks; ++j) pack_at(out + i * out_row + j * kPackLanes<C>) += sum[i][j];
  }
}

template <int kPacks, class C>
KF_CPU_INLINE void multiply_columns(Matrix<const C> a, Matrix<const C> b, C* out, int64_t out_row, int64_t rows,
                                    int64_t depth) {
  int64_t i = 0;
  for (; i + 4 <= rows; i += 4) {
    multiply_tile<4, kPacks>(Matrix<const C>{a.data + i * a.row, a.row, a.column}, b, out + i * out_row, out_row,
                             depth);
  }
  for (; i < rows; ++i) {
    multiply_tile<1, kPacks>(Matrix<const C>{a.data + i * a.row, a.row, a.column}, b, out + i * out_row, out_row,
                             depth);
  }
}

// out += a · b, out of shape [rows, columns]. The rows of b and of out are contiguous.
template <class C>
KF_CPU_INLINE void multiply_add_any(Matrix<const C> a, Matrix<const C> b, Matrix<C> out, int64_t rows, int64_t columns,
                                    int64_t depth) {
  constexpr int L = kPackLanes<C>;
  int64_t j = 0;
  for (; j + 2 * L <= columns; j += 2 * L) {
    multiply_columns<2>(a, Matrix<const C>{b.data + j, b.row}, out.data + j, out.row, rows, depth);
  }
  for (; j + L <= columns; j += L) {
    multiply_columns<1>(a, Matrix<const C>{b.data + j, b.row}, out.data + j, out.row, rows, depth);
  }
  for (; j < columns; ++j) {
    for (int64_t i = 0; i < rows; ++i) {
      C sum = 0;
      for (int64_t k = 0; k < depth; ++k) sum += a.data[i * a.row + k * a.column] * b.data[k * b.row + j];
      out.data[i * out.row + j] += sum;
    }
  }
}

// Columns of a softmax side by side: kTileRows queries, whose scores for key j stand in row j of `scores`.
constexpr int kTileRows = 32;

// Replaces each column's scores by exp(score − the column's maximum), and says by what to divide, and the log-sum-exp.
// Column r sees its first `seen[r]` keys; where it sees none, all weights and the factor are 0, and lse is −inf.
template <class C>
KF_CPU_INLINE void softmax_columns_any(C* scores, int64_t keys, const int64_t* seen, C* inverse, C* lse) {
  C most[kTileRows];
  C sum[kTileRows] = {};
  std::fill(most, most + kTileRows, -std::numeric_limits<C>::infinity());
  const int64_t all_see = std::clamp<int64_t>(*std::min_element(seen, seen + kTileRows), 0, keys);
  for (int64_t j = all_see; j < keys; ++j) {
    for (int r = 0; r < kTileRows; ++r) {
      if (j >= seen[r]) scores[j * kTileRows + r] = -std::numeric_limits<C>::infinity();
    }
  }
  for (int64_t j = 0; j < keys; ++j) {
    for (int r = 0; r < kTileRows; ++r) most[r] = std::max(most[r], scores[j * kTileRows + r]);
  }
  for (int r = 0; r < kTileRows; ++r) {
    if (most[r] == -std::numeric_limits<C>::infinity()) most[r] = 0;  // sees nothing: exp(−inf − 0) is 0, not NaN
  }
  for (int64_t j = 0; j < keys; ++j) {
    for (int r = 0; r < kTileRows; ++r) {
      const C weight = exp_of_nonpositive(scores[j * kTileRows + r] - most[r]);
      scores[j * kTileRows + r] = weight;
      sum[r] += weight;
    }
  }
  for (int r = 0; r < kTileRows; ++r) {
    inverse[r] = sum[r] == 0 ? C(0) : C(1) / sum[r];
    lse[r] = most[r] + std::log(sum[r]);
  }
}

template <class C>
struct Sums {
  C values;
  C squares;
};

// Σ (row[c] − from) and Σ (row[c] − from)², in packs: several sums side by side, added up at the end.
template <class C>
KF_CPU_INLINE Sums<C> sums_from(const C* row, int64_t width, C from) {
  constexpr int L = kPackLanes<C>;
  constexpr int kSums = 4;
  Pack<C> values[kSums] = {};
  Pack<C> squares[kSums] = {};
  int64_t c = 0;
  for (; c + kSums * L <= width; c += kSums * L) {
    for (int i = 0; i < kSums; ++i) {
      const Pack<C> off = pack_at(row + c + i * L) - from;
      values[i] += off;
      squares[i] += off * off;
    }
  }
  for (; c + L <= width; c += L) {
    const Pack<C> off = pack_at(row + c) - from;
    values[0] += off;
    squares[0] += off * off;
  }
  for (int i = 1; i < kSums; ++i) {
    values[0] += values[i];
    squares[0] += squares[i];
  }
  Sums<C> sums{0, 0};
  for (int i = 0; i < L; ++i) {
    sums.values += values[0][i];
    sums.squares += squares[0][i];
  }
  for (; c < width; ++c) {
    const C off = row[c] - from;
    sums.values += off;
    sums.squares += off * off;
  }
  return sums;
}

// Where the next row's operands lie, to be fetched into cache while this row is computed. A row is gone over twice, and
// a CPU that looks ahead by itself does so only in the pass that waits for memory.
struct NextRow {
  const void* operands[3] = {};  // or null
  int64_t element_size = 0;

  // What corresponds to the elements from c on: a line of the cache, more than a pack.
  KF_CPU_INLINE void prefetch(int64_t c) const {
    for (const void* operand : operands) {
      if (operand != nullptr) __builtin_prefetch(static_cast<const char*>(operand) + c * element_size);
    }
  }
};

// What LayerNorm keeps of a row for the backward pass.
template <class C>
struct MeanAndRstd {
  C mean;
  C rstd;
};

// A row's mean, what that lacks because it was rounded, and 1 / sqrt(variance + eps).
template <class C>
struct Statistics {
  C mean;
  C rest;
  C rstd;
};

// Two passes, and the second also finds the rest of the mean, as include/step3/statistics.h explains.
template <class C>
KF_CPU_INLINE Statistics<C> statistics_any(const C* row, int64_t width, C eps) {
  const C mean = sums_from(row, width, C(0)).values / C(width);
  const Sums<C> off = sums_from(row, width, mean);
  const C rest = off.values / C(width);
  return {mean, rest, C(1) / std::sqrt(off.squares / C(width) - rest * rest + eps)};
}

// out[c] = (row[c] − mean) / sqrt(variance + eps) · weight[c] + bias[c]; out may be row.
template <class C>
KF_CPU_INLINE MeanAndRstd<C> normalize_any(const C* row, const C* weight, const C* bias, int64_t width, C eps, C* out,
                                           NextRow next) {
  constexpr int64_t L = kPackLanes<C>;
  const Statistics<C> s = statistics_any(row, width, eps);
  int64_t c = 0;
  for (; c + L <= width; c += L) {
    next.prefetch(c);
    pack_at(out + c) = (pack_at(row + c) - s.mean - s.rest) * s.rstd * pack_at(weight + c) + pack_at(bias + c);
  }
  for (; c < width; ++c) out[c] = (row[c] - s.mean - s.rest) * s.rstd * weight[c] + bias[c];
  return {s.mean + s.rest, s.rstd};
}

// What `layer_norm_gradient_any` needs of a row, and where it writes.
template <class C>
struct GradientRow {
  const C* grad;
  const C* x;
  const C* weight;
  const C* more;  // added to grad_x, or null
  C* g;           // memory for a row
  C* grad_x;      // may be x
  C* grad_weight;
  C* grad_bias;
};

template <class V, class C>
KF_CPU_INLINE V& elements_at(C* p) {
  return *reinterpret_cast<V*>(p);
}

// The gradients of the elements from c on, as many as V holds.
template <class V, class C>
KF_CPU_INLINE void gradient_at(const GradientRow<C>& row, int64_t c, MeanAndRstd<C> s, C rest, C average_g,
                               C average_gx) {
  const V x_hat = (elements_at<const V>(row.x + c) - s.mean - rest) * s.rstd;
  const V grad = elements_at<const V>(row.grad + c);
  elements_at<V>(row.grad_weight + c) += grad * x_hat;
  elements_at<V>(row.grad_bias + c) += grad;
  const V grad_x = s.rstd * (elements_at<const V>(row.g + c) - average_g - x_hat * average_gx);
  elements_at<V>(row.grad_x + c) = row.more == nullptr ? grad_x : grad_x + elements_at<const V>(row.more + c);
}

// The gradients of a row: grad_x[c], and what it adds to those of weight and bias. g gets grad · weight, rounded: in
// one FMA with the subtraction of the average, what it was rounded by would remain where the two are equal, times rstd.
template <class C>
KF_CPU_INLINE void layer_norm_gradient_any(GradientRow<C> row, MeanAndRstd<C> s, int64_t width, NextRow next) {
  constexpr int64_t L = kPackLanes<C>;
  constexpr int64_t kSums = 2;   // side by side
  Pack<C> packs[3][kSums] = {};  // sums of g, of g·(x − mean) and of x − mean, which finds what the rounded mean lacks
  C sums[3] = {};
  int64_t c = 0;
  for (; c + kSums * L <= width; c += kSums * L) {
    __builtin_prefetch(row.grad_x + c, 1);  // to be written below
    for (int64_t i = 0; i < kSums; ++i) {
      const Pack<C> g = pack_at(row.grad + c + i * L) * pack_at(row.weight + c + i * L);
      const Pack<C> off = pack_at(row.x + c + i * L) - s.mean;
      pack_at(row.g + c + i * L) = g;
      packs[0][i] += g;
      packs[1][i] += g * off;
      packs[2][i] += off;
    }
  }
  for (int k = 0; k < 3; ++k) {
    const Pack<C> both = packs[k][0] + packs[k][1];
    for (int64_t j = 0; j < L; ++j) sums[k] += both[j];
  }
  // Else the compiler makes two loops, one for arrays that touch, which round differently; where arrays lie is chance.
#pragma GCC ivdep
  for (; c < width; ++c) {
    const C off = row.x[c] - s.mean;
    row.g[c] = row.grad[c] * row.weight[c];
    sums[0] += row.g[c];
    sums[1] += row.g[c] * off;
    sums[2] += off;
  }
  const C rest = sums[2] / C(width), average_g = sums[0] / C(width);
  const C average_gx = (sums[1] / C(width) - average_g * rest) * s.rstd;
  for (c = 0; c + L <= width; c += L) {
    next.prefetch(c);
    gradient_at<Pack<C>>(row, c, s, rest, average_g, average_gx);
  }
  for (; c < width; ++c) gradient_at<C>(row, c, s, rest, average_g, average_gx);
}

// The loops as ordinary functions, each once for every kind of CPU.
#define KF_DEFINE_LOOPS(C)                                                                                            \
  KF_CPU_CLONES void multiply_add(Matrix<const C> a, Matrix<const C> b, Matrix<C> out, int64_t rows, int64_t columns, \
                                  int64_t depth) {                                                                    \
    multiply_add_any<C>(a, b, out, rows, columns, depth);                                                             \
  }                                                                                                                   \
  KF_CPU_CLONES void softmax_columns(C* scores, int64_t keys, const int64_t* seen, C* inverse, C* lse) {              \
    softmax_columns_any<C>(scores, keys, seen, inverse, lse);                                                         \
  }                                                                                                                   \
  KF_CPU_CLONES MeanAndRstd<C> normalize(const C* row, const C* weight, const C* bias, int64_t width, C eps, C* out,  \
                                         const NextRow& next) {                                                       \
    return normalize_any<C>(row, weight, bias, width, eps, out, next);                                                \
  }                                                                                                                   \
  KF_CPU_CLONES void layer_norm_gradient(const GradientRow<C>& row, MeanAndRstd<C> s, int64_t width,                  \
                                         const NextRow& next) {                                                       \
    layer_norm_gradient_any<C>(row, s, width, next);                                                                  \
  }
namespace {
KF_DEFINE_LOOPS(float)
KF_DEFINE_LOOPS(double)
}  // namespace
#undef KF_DEFINE_LOOPS

}  // namespace kf::cpu
