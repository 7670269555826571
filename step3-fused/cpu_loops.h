// The three inner loops of this stage's plain C++ versions: a matrix product, softmax, a row's statistics.
//
// Written with the compiler's vector type (GCC and clang have it): `Pack` is 32 bytes of C, and + and * work on all of
// them at once. On x86-64 Linux, GCC compiles each loop three times, for AVX-512, for AVX2 and for any CPU, and the
// program takes at its start what the CPU has.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define KF_FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define KF_FOR_EACH_CPU
#endif
#define KF_INLINE inline __attribute__((always_inline))

namespace kf::cpu {

template <class C>
struct PackOf {
  typedef C type __attribute__((vector_size(32), aligned(alignof(C)), may_alias));
};
template <class C>
using Pack = typename PackOf<C>::type;
template <class C>
constexpr int kLanes = 32 / sizeof(C);

template <class C>
KF_INLINE Pack<C>& pack_at(C* p) {
  return *reinterpret_cast<Pack<C>*>(p);
}
template <class C>
KF_INLINE const Pack<C>& pack_at(const C* p) {
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
KF_INLINE void multiply_tile(Matrix<const C> a, Matrix<const C> b, C* out, int64_t out_row, int64_t depth) {
  Pack<C> sum[kRows][kPacks] = {};
  for (int64_t k = 0; k < depth; ++k) {
    const C* from = b.data + k * b.row;
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kPacks; ++j) {
        sum[i][j] += a.data[i * a.row + k * a.column] * pack_at(from + j * kLanes<C>);
      }
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kPacks; ++j) pack_at(out + i * out_row + j * kLanes<C>) += sum[i][j];
  }
}

template <int kPacks, class C>
KF_INLINE void multiply_columns(Matrix<const C> a, Matrix<const C> b, C* out, int64_t out_row, int64_t rows,
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
KF_INLINE void multiply_add_any(Matrix<const C> a, Matrix<const C> b, Matrix<C> out, int64_t rows, int64_t columns,
                                int64_t depth) {
  constexpr int L = kLanes<C>;
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

// exp(x) for x ≤ 0 in a form that compilers vectorise: 2^n · e^r with |r| ≤ ln 2 / 2, e^r by its series. Below −87, 0.
KF_INLINE float exponential(float x) {
  const float bounded = std::max(x, -87.0f);
  const float shifted = bounded * 1.44269504f + 12582912.0f;  // + 1.5·2²³: the integer n lands in the lowest bits
  const float n = shifted - 12582912.0f;
  const float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  float series = 1.0f / 5040;
  series = series * r + 1.0f / 720;
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
  int32_t bits;
  std::memcpy(&bits, &shifted, 4);
  bits = static_cast<int32_t>((static_cast<uint32_t>(bits) << 23) + (127u << 23));  // 2^n
  float power;
  std::memcpy(&power, &bits, 4);
  return x < -87.0f ? 0.0f : series * power;
}
KF_INLINE double exponential(double x) { return std::exp(x); }

// Columns of a softmax side by side: kTileRows queries, whose scores for key j stand in row j of `scores`.
constexpr int kTileRows = 32;

// Replaces each column's scores by exp(score − the column's maximum), and says by what to divide. Column r sees its
// first `seen[r]` keys; where it sees none, all weights and the factor are 0.
template <class C>
KF_INLINE void softmax_columns_any(C* scores, int64_t keys, const int64_t* seen, C* inverse) {
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
      const C weight = exponential(scores[j * kTileRows + r] - most[r]);
      scores[j * kTileRows + r] = weight;
      sum[r] += weight;
    }
  }
  for (int r = 0; r < kTileRows; ++r) inverse[r] = sum[r] == 0 ? C(0) : C(1) / sum[r];
}

template <class C>
struct Sums {
  C values;
  C squares;
};

// Σ (row[c] − from) and Σ (row[c] − from)², in packs: several sums side by side, added up at the end.
template <class C>
KF_INLINE Sums<C> sums_from(const C* row, int64_t width, C from) {
  constexpr int L = kLanes<C>;
  Pack<C> values[2] = {};
  Pack<C> squares[2] = {};
  int64_t c = 0;
  for (; c + 2 * L <= width; c += 2 * L) {
    for (int i = 0; i < 2; ++i) {
      const Pack<C> off = pack_at(row + c + i * L) - from;
      values[i] += off;
      squares[i] += off * off;
    }
  }
  values[0] += values[1];
  squares[0] += squares[1];
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

// out[c] = (row[c] − mean) / sqrt(variance + eps) · weight[c] + bias[c]; out may be row. Two passes, and the second
// also finds the rest of the mean, as include/step3/statistics.h explains.
template <class C>
KF_INLINE void normalize_any(const C* row, const C* weight, const C* bias, int64_t width, C eps, C* out) {
  const C mean = sums_from(row, width, C(0)).values / C(width);
  const Sums<C> off = sums_from(row, width, mean);
  const C rest = off.values / C(width);
  const C rstd = C(1) / std::sqrt(off.squares / C(width) - rest * rest + eps);
  for (int64_t c = 0; c < width; ++c) out[c] = (row[c] - mean - rest) * rstd * weight[c] + bias[c];
}

// The loops as ordinary functions, each once for every kind of CPU.
#define KF_DEFINE_LOOPS(C)                                                                                     \
  KF_FOR_EACH_CPU void multiply_add(Matrix<const C> a, Matrix<const C> b, Matrix<C> out, int64_t rows,         \
                                    int64_t columns, int64_t depth) {                                          \
    multiply_add_any<C>(a, b, out, rows, columns, depth);                                                      \
  }                                                                                                            \
  KF_FOR_EACH_CPU void softmax_columns(C* scores, int64_t keys, const int64_t* seen, C* inverse) {             \
    softmax_columns_any<C>(scores, keys, seen, inverse);                                                       \
  }                                                                                                            \
  KF_FOR_EACH_CPU void normalize(const C* row, const C* weight, const C* bias, int64_t width, C eps, C* out) { \
    normalize_any<C>(row, weight, bias, width, eps, out);                                                      \
  }
namespace {
KF_DEFINE_LOOPS(float)
KF_DEFINE_LOOPS(double)
}  // namespace
#undef KF_DEFINE_LOOPS

}  // namespace kf::cpu
