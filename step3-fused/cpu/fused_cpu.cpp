// The same ops in plain C++: what each kernel must compute.
//
// They have the kernels' shape: a tile of query rows with all heads side by side is attended to, projected and
// normalised before the next tile begins, so that what lies between stays in the CPU's cache. A tile is one thread's
// work.
#include "cpu/fused_cpu.h"

#include <kf/cpu.h>
#include <step1/dropout_cpu.h>
#include <step2/dropout_cpu.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "cpu/cpu_loops.h"

namespace kf::cpu {
namespace {

constexpr int64_t kGrain = 1 << 14;  // elements below which a second thread costs more than it brings
constexpr int64_t kMostParts = 64;   // of rows that are summed one after the other

template <class From, class To>
KF_CPU_INLINE void convert_any(const From* from, int64_t n, To* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<To>(from[i]);
}

// to[i] = x[i] + y[i]; to may be x.
template <class From, class To>
KF_CPU_INLINE void add_any(const From* x, const From* y, int64_t n, To* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<To>(x[i]) + static_cast<To>(y[i]);
}

// What stands in front of a residual's addition: see include/step3/front.h.
template <class C>
struct Front {
  const C* x_bias;          // or null
  const uint16_t* numbers;  // of the row's elements, or null: all are kept
  uint32_t threshold;
  C scale;
};

// to[i] = dropout(x[i] + x_bias[i]) + y[i], one after the other in a row that is in cache: no compiler rounds two of
// these together in vectors and apart in what is left over. `to` may be x.
template <class X, class T, class C>
KF_CPU_INLINE void add_behind_any(const Front<C>& front, const X* x, const T* y, int64_t n, C* to) {
  convert_any(x, n, to);
  if (front.x_bias != nullptr) add_any(to, front.x_bias, n, to);
  if (front.numbers != nullptr) {
    for (int64_t i = 0; i < n; ++i) {
      const C value = front.scale * to[i];
      to[i] = front.numbers[i] >= front.threshold ? value : C(0);
    }
  }
  for (int64_t i = 0; i < n; ++i) to[i] += static_cast<C>(y[i]);
}

#define KF_DEFINE_FROM(T, C)                                                                       \
  KF_CPU_CLONES void convert(const T* from, int64_t n, C* to) { convert_any(from, n, to); }        \
  KF_CPU_CLONES void add(const T* x, const T* y, int64_t n, C* to) { add_any(x, y, n, to); }       \
  KF_CPU_CLONES void add_behind(const Front<C>& front, const T* x, const T* y, int64_t n, C* to) { \
    add_behind_any(front, x, y, n, to);                                                            \
  }
KF_DEFINE_FROM(float, float)
KF_DEFINE_FROM(double, double)
KF_DEFINE_FROM(Half, float)
KF_DEFINE_FROM(BFloat16, float)
#undef KF_DEFINE_FROM
#define KF_DEFINE_TO(T)                                                                                        \
  KF_CPU_CLONES void convert(const float* from, int64_t n, T* to) { convert_any(from, n, to); }                \
  KF_CPU_CLONES void add_behind(const Front<float>& front, const float* x, const T* y, int64_t n, float* to) { \
    add_behind_any(front, x, y, n, to);                                                                        \
  }
KF_DEFINE_TO(Half)
KF_DEFINE_TO(BFloat16)
#undef KF_DEFINE_TO

template <class T>
std::vector<compute_t<T>> converted(const void* from, int64_t n) {
  std::vector<compute_t<T>> to(n);
  convert(static_cast<const T*>(from), n, to.data());
  return to;
}

// LayerNorm of one row from x to y, by way of `buffer` where they are not of type C. x may be the buffer.
template <class X, class C, class T>
MeanAndRstd<C> normalize_row(const X* x, const C* weight, const C* bias, int64_t width, C eps, C* buffer, T* y,
                             const NextRow& next = {}) {
  const C* row = buffer;
  if constexpr (std::is_same_v<X, C>) {
    row = x;
  } else {
    convert(x, width, buffer);
  }
  if constexpr (std::is_same_v<T, C>) {
    return normalize(row, weight, bias, width, eps, y, next);
  } else {
    const MeanAndRstd<C> kept = normalize(row, weight, bias, width, eps, buffer, next);
    convert(buffer, width, y);
    return kept;
  }
}

template <class C, class Args>
void keep(const Args& a, int64_t row, MeanAndRstd<C> kept) {
  if (a.mean == nullptr) return;  // nobody wants them
  static_cast<C*>(a.mean)[row] = kept.mean;
  static_cast<C*>(a.rstd)[row] = kept.rstd;
}

// Rows of one head as a matrix of C: where they lie, if T is C already; else converted into `copy`.
template <class T, class C>
Matrix<const C> rows_of(const T* from, int64_t row_stride, int64_t rows, int64_t head_dim, std::vector<C>& copy) {
  if constexpr (std::is_same_v<T, C>) {
    return {from, row_stride};
  } else {
    copy.resize(rows * head_dim);
    for (int64_t r = 0; r < rows; ++r) convert(from + r * row_stride, head_dim, copy.data() + r * head_dim);
    return {copy.data(), head_dim};
  }
}

// Where a text's queries end, and which keys exist for them: those of a batch, or of a packed row's document.
struct Text {
  int64_t queries_end, begin, end;

  Text(const Attention& a, int64_t batch, int64_t query) {
    if (a.cu_seqlens == nullptr) {
      queries_end = a.q_length;
      begin = a.key_begin == nullptr ? 0 : std::clamp<int64_t>(a.key_begin[batch], 0, a.k_length);
      end = a.key_end == nullptr ? a.k_length : std::min<int64_t>(a.key_end[batch], a.k_length);
      return;
    }
    const int32_t* const next = std::upper_bound(a.cu_seqlens, a.cu_seqlens + a.documents, query);
    begin = next[-1];
    queries_end = end = *next;
  }
};

// Attention of all heads for up to kTileRows queries of a text, side by side in tile[r · width + h · head_dim + d].
template <class T, class C>
void attend_rows(const Attention& a, int64_t batch, int64_t first_row, int64_t rows, const Text& text, C* tile) {
  const int64_t width = a.heads * a.head_dim;
  // The keys that exist are counted from the first one.
  const int64_t begin = text.begin, end = text.end;
  int64_t seen[kTileRows];  // how many keys each query sees
  for (int64_t r = 0; r < kTileRows; ++r) {
    const int64_t row = first_row + std::min(r, rows - 1);
    const int64_t last = a.causal ? std::min(row + 1 + a.k_length - a.q_length, end) : end;
    seen[r] = std::max<int64_t>(last - begin, 0);
  }
  const int64_t keys = seen[kTileRows - 1];

  std::vector<C> queries(a.head_dim * kTileRows);  // turned: element (d, r)
  std::vector<C> scores(keys * kTileRows);  // turned: element (j, r), so that a column's neighbours are other rows
  std::vector<C> key_copy, value_copy, factors(a.threshold == 0 ? 0 : keys);
  C inverse[kTileRows], lse[kTileRows];
  std::fill(tile, tile + rows * width, C(0));

  for (int64_t head = 0; head < a.heads; ++head) {
    const auto base = [&](const TensorRef& x, int64_t row) {
      return static_cast<const T*>(x.data) + batch * x.batch_stride + head * x.head_stride + row * x.seq_stride;
    };
    const T* q = base(a.q, first_row);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t d = 0; d < a.head_dim; ++d) {
        queries[d * kTileRows + r] = static_cast<C>(a.scale) * static_cast<C>(q[r * a.q.seq_stride + d]);
      }
    }
    const Matrix<const C> k = rows_of(base(a.k, begin), a.k.seq_stride, keys, a.head_dim, key_copy);
    const Matrix<const C> v = rows_of(base(a.v, begin), a.v.seq_stride, keys, a.head_dim, value_copy);

    std::fill(scores.begin(), scores.end(), C(0));
    multiply_add(k, {queries.data(), kTileRows}, {scores.data(), kTileRows}, keys, kTileRows, a.head_dim);
    softmax_columns(scores.data(), keys, seen, inverse, lse);
    const int64_t head_of_all = batch * a.heads + head;
    if (a.threshold != 0) {  // after the sums, which dropped weights count in
      for (int64_t r = 0; r < rows; ++r) {
        dropout_factors(a, head_of_all, first_row + r, begin, seen[r], factors.data());
        for (int64_t j = 0; j < seen[r]; ++j) scores[j * kTileRows + r] *= factors[j];
      }
    }
    C* out = tile + head * a.head_dim;
    multiply_add({scores.data(), 1, kTileRows}, v, {out, width}, rows, a.head_dim, keys);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t d = 0; d < a.head_dim; ++d) out[r * width + d] *= inverse[r];
    }
    if (a.lse != nullptr) std::copy_n(lse, rows, static_cast<C*>(a.lse) + head_of_all * a.q_length + first_row);
  }
}

// The same for a tile, in which several documents may lie: each is multiplied by itself, for 0 times another's NaN is
// NaN.
template <class T, class C>
void attend_tile(const Attention& a, int64_t batch, int64_t first_row, int64_t rows, C* tile) {
  for (int64_t row = first_row; row < first_row + rows;) {
    const Text text(a, batch, row);
    const int64_t end = std::min(first_row + rows, text.queries_end);
    attend_rows<T>(a, batch, row, end - row, text, tile + (row - first_row) * a.heads * a.head_dim);
    row = end;
  }
}

// Calls f(batch, first row, rows) for each tile of query rows, on all cores.
template <class F>
void for_each_tile(const Attention& a, F&& f) {
  const int64_t tiles = (a.q_length + kTileRows - 1) / kTileRows;
  parallel_for(0, a.batch * tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first_row = i % tiles * kTileRows;
      f(i / tiles, first_row, std::min<int64_t>(kTileRows, a.q_length - first_row));
    }
  });
}

}  // namespace

void layer_norm(const kf::layer_norm::Args& a) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    using C = compute_t<T>;
    const std::vector<C> weight = converted<T>(a.weight, a.width);
    const std::vector<C> bias = converted<T>(a.bias, a.width);
    parallel_for(0, a.rows, std::max<int64_t>(1, kGrain / a.width), [&](int64_t begin, int64_t end) {
      std::vector<C> buffer(a.width);
      for (int64_t r = begin; r < end; ++r) {
        const T* x = static_cast<const T*>(a.x) + r * a.width;
        T* y = static_cast<T*>(a.y) + r * a.width;
        keep(a, r, normalize_row(x, weight.data(), bias.data(), a.width, static_cast<C>(a.eps), buffer.data(), y));
      }
    });
  });
}

void layer_norm_backward(const kf::layer_norm_backward::Args& a) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    using C = compute_t<T>;
    const std::vector<C> weight = converted<T>(a.weight, a.width);
    // Each part of the rows has sums of its own, in two rows of `sums`, and the parts are added up in their order: the
    // result does not depend on the number of threads.
    const int64_t rows_of_part = std::max<int64_t>({1, kGrain / a.width, (a.rows + kMostParts - 1) / kMostParts});
    const int64_t parts = (a.rows + rows_of_part - 1) / rows_of_part, sums_of_part = 2 * a.width;
    const std::unique_ptr<C[]> sums(new C[parts * sums_of_part]);
    parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
      std::vector<C> grads(a.width), xs(a.width), others(a.width), products(a.width);
      std::fill(sums.get() + begin * sums_of_part, sums.get() + end * sums_of_part, C(0));
      for (int64_t r = begin * rows_of_part; r < std::min(end * rows_of_part, a.rows); ++r) {
        C* of_weight = sums.get() + r / rows_of_part * sums_of_part;
        const T* grad = static_cast<const T*>(a.grad) + r * a.width;
        const T* x = static_cast<const T*>(a.x) + r * a.width;
        const T* more = a.grad_sum == nullptr ? nullptr : static_cast<const T*>(a.grad_sum) + r * a.width;
        T* out = static_cast<T*>(a.grad_x) + r * a.width;
        C* to = xs.data();
        if constexpr (std::is_same_v<T, C>) to = out;
        const auto row_of = [&](const T* from, std::vector<C>& copy) {
          return rows_of(from, a.width, 1, a.width, copy).data;
        };
        layer_norm_gradient(
            {row_of(grad, grads), row_of(x, xs), weight.data(), more == nullptr ? nullptr : row_of(more, others),
             products.data(), to, of_weight, of_weight + a.width},
            {static_cast<const C*>(a.mean)[r], static_cast<const C*>(a.rstd)[r]}, a.width,
            {{grad + a.width, x + a.width, more == nullptr ? nullptr : more + a.width}, sizeof(T)});
        if constexpr (!std::is_same_v<T, C>) convert(to, a.width, out);
      }
    });
    // One core does this as fast as two, unless rows are long.
    parallel_for(0, sums_of_part, std::max<int64_t>(1, 16 * kGrain / parts), [&](int64_t begin, int64_t end) {
      for (int64_t part = 1; part < parts; ++part) {
        add(sums.get() + begin, sums.get() + part * sums_of_part + begin, end - begin, sums.get() + begin);
      }
    });
    convert(sums.get(), a.width, static_cast<T*>(a.grad_weight));
    convert(sums.get() + a.width, a.width, static_cast<T*>(a.grad_bias));
  });
}

void residual_layer_norm(const kf::residual_layer_norm::Args& a) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    using C = compute_t<T>;
    const std::vector<C> weight = converted<T>(a.weight, a.width);
    const std::vector<C> bias = converted<T>(a.bias, a.width);
    const std::vector<C> x_bias = a.x_bias == nullptr ? std::vector<C>() : converted<T>(a.x_bias, a.width);
    const bool has_front = a.x_bias != nullptr || a.threshold != 0;
    parallel_for(0, a.rows, std::max<int64_t>(1, kGrain / a.width), [&](int64_t begin, int64_t end) {
      std::vector<C> buffer(a.width);
      std::vector<uint16_t> numbers;
      for (int64_t r = begin; r < end; ++r) {
        const T* x = static_cast<const T*>(a.x) + r * a.width;
        const T* residual = static_cast<const T*>(a.residual) + r * a.width;
        T* sum = static_cast<T*>(a.sum) + r * a.width;
        T* y = static_cast<T*>(a.y) + r * a.width;
        C* row = buffer.data();
        NextRow next;  // none for half types: to convert a row takes longer than to fetch it
        if constexpr (std::is_same_v<T, C>) {
          row = sum;
          next = {{x + a.width, residual + a.width}, sizeof(T)};
        }
        if (has_front) {
          add_behind(Front<C>{a.x_bias == nullptr ? nullptr : x_bias.data(),
                              a.threshold == 0 ? nullptr : row_numbers(a, r, numbers), a.threshold,
                              keep_scale<C>(a.threshold)},
                     x, residual, a.width, row);
        } else {
          add(x, residual, a.width, row);
        }
        if constexpr (!std::is_same_v<T, C>) convert(row, a.width, sum);
        keep(a, r,
             normalize_row(row, weight.data(), bias.data(), a.width, static_cast<C>(a.eps), buffer.data(), y, next));
      }
    });
  });
}

void attention_residual_layer_norm(const kf::attention_residual_layer_norm::Args& a) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    using C = compute_t<T>;
    const int64_t width = a.attention.heads * a.attention.head_dim;
    const std::vector<C> weight = converted<T>(a.weight, width);
    const std::vector<C> bias = converted<T>(a.bias, width);
    for_each_tile(a.attention, [&](int64_t batch, int64_t first_row, int64_t rows) {
      std::vector<C> tile(kTileRows * width);
      attend_tile<T>(a.attention, batch, first_row, rows, tile.data());
      const int64_t first = batch * a.attention.q_length + first_row;
      if (a.attended != nullptr) convert(tile.data(), rows * width, static_cast<T*>(a.attended) + first * width);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t start = (first + r) * width;
        const T* residual = static_cast<const T*>(a.residual) + start;
        C* row = tile.data() + r * width;
        for (int64_t c = 0; c < width; ++c) row[c] += static_cast<C>(residual[c]);
        T* y = static_cast<T*>(a.y) + start;
        keep(a, first + r, normalize_row(row, weight.data(), bias.data(), width, static_cast<C>(a.eps), row, y));
      }
    });
  });
}

void attention_block(const kf::attention_block::Args& a) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    using C = compute_t<T>;
    const int64_t width = a.attention.heads * a.attention.head_dim;
    const std::vector<C> weight = converted<T>(a.weight, width);
    const std::vector<C> bias = converted<T>(a.bias, width);
    const std::vector<C> proj_bias = converted<T>(a.proj_bias, width);
    const kf::residual_layer_norm::Args after = normalisation(a, nullptr);
    std::vector<C> proj_copy;
    const Matrix<const C> proj = rows_of(static_cast<const T*>(a.proj_weight), width, width, width, proj_copy);
    for_each_tile(a.attention, [&](int64_t batch, int64_t first_row, int64_t rows) {
      std::vector<C> tile(kTileRows * width), sums(rows * width);
      std::vector<uint16_t> numbers;
      attend_tile<T>(a.attention, batch, first_row, rows, tile.data());
      const int64_t first = batch * a.attention.q_length + first_row;
      if (a.attended != nullptr) convert(tile.data(), rows * width, static_cast<T*>(a.attended) + first * width);

      multiply_add({tile.data(), width}, proj, {sums.data(), width}, rows, width, width);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t start = (first + r) * width;
        C* row = sums.data() + r * width;
        add_behind(Front<C>{proj_bias.data(), a.threshold == 0 ? nullptr : row_numbers(after, first + r, numbers),
                            a.threshold, keep_scale<C>(a.threshold)},
                   row, static_cast<const T*>(a.residual) + start, width, row);
        convert(row, width, static_cast<T*>(a.sum) + start);
        T* y = static_cast<T*>(a.y) + start;
        keep(a, first + r, normalize_row(row, weight.data(), bias.data(), width, static_cast<C>(a.eps), row, y));
      }
    });
  });
}

}  // namespace kf::cpu
