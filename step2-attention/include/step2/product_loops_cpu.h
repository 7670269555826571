// The loops of product_cpu.h: operands, what may be done to them before and to the sums after, and the structs that
// with_registers compiles for each kind of CPU.
#pragma once

#include <kf/cpu.h>
#include <step1/gelu_cpu.h>
#include <step1/philox_cpu.h>
#include <step2/vectorised_cpu.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>

namespace kf::cpu {

// The operands. Everything is contiguous; rows, depth and width are at least 1.
template <class T>
struct Product {
  const T* x;       // [rows, depth], or [depth, rows] where transposed
  const T* weight;  // [depth, width], or [width, depth] where transposed
  const T* bias;    // [width], or null
  T* out;           // [rows, width]
  int64_t rows, depth, width;
  bool x_transposed = false, weight_transposed = false;
};

// Memory for n elements, at a multiple of 64 bytes, with no values yet: who writes first takes it from the system, and
// that should be many threads.
template <class T>
class Scratch {
  static constexpr int64_t kPerLine = 64 / sizeof(T);
  struct alignas(64) Line {
    T values[kPerLine];
  };
  std::unique_ptr<Line[]> lines_;

 public:
  explicit Scratch(int64_t n) : lines_(new Line[(n + kPerLine - 1) / kPerLine]) {}
  T* data() { return lines_[0].values; }
};

// ---- what may be done to `count` neighbours of one row, which begin at column `first`. As a prologue to x, columns
// being those of the depth; as an epilogue to the sums, which hold the bias. A struct of your own must have its
// operator() KF_CPU_INLINE, so that it is compiled for the machine at hand. ----

struct AsItIs {
  template <class C>
  KF_CPU_INLINE void operator()(int64_t, int64_t, int64_t, C*) const {}
};

template <bool kTanh>
struct Gelu {
  template <class C>
  KF_CPU_INLINE void operator()(int64_t, int64_t, int64_t count, C* values) const {
    for (int64_t i = 0; i < count; ++i) values[i] = gelu_of<kTanh>(values[i]);
  }
};

// Dropout, then the residual is added, as step 1's bias_dropout_residual does.
template <class T>
struct DropoutResidual {
  const T* residual;  // [rows, width]
  int64_t width;
  uint64_t seed, offset;
  uint32_t threshold;  // an element is kept where its 16-bit random number is at least this

  template <class C>
  KF_CPU_INLINE void operator()(int64_t row, int64_t first, int64_t count, C* values) const {
    const T* from = residual + row * width + first;
    const uint32_t least = threshold;
    if (least == 0) {  // nothing is dropped
      for (int64_t i = 0; i < count; ++i) values[i] += static_cast<C>(from[i]);
      return;
    }
    constexpr int64_t kPiece = 256;
    uint16_t memory[kPiece + (kPhiloxLanes + 2) * 8];
    const C scale = keep_scale<C>(least);
    for (int64_t begin = 0; begin < count; begin += kPiece) {
      const int64_t n = std::min(kPiece, count - begin), index = row * width + first + begin;
      philox(seed, offset, static_cast<uint64_t>(index / 8), (index + n - 1) / 8 - index / 8 + 1, memory);
      const uint16_t* numbers = memory + index % 8;
      // Two loops: in one the compiler may round product and sum together in scalar code and apart in vectors, and
      // where one ends and the other begins depends on how threads share out the columns.
      for (int64_t i = 0; i < n; ++i) {
        const C value = scale * values[begin + i];
        values[begin + i] = numbers[i] >= least ? value : C(0);
      }
      for (int64_t i = 0; i < n; ++i) values[begin + i] += static_cast<C>(from[begin + i]);
    }
  }
};

namespace product_detail {

constexpr int64_t kDepthBlock = 256;
constexpr int64_t kDepthStride = kDepthBlock + 16;  // of packed rows: no power of two, so they lie in different sets
constexpr int64_t kMostRows = 1024;
constexpr int64_t kMostBytes = 8 << 20;  // of these rows
constexpr int64_t kFewRows = 8;
constexpr int64_t kSteps = 8;       // rows of the weight that few rows of x meet together
constexpr int64_t kWork = 1 << 17;  // multiplications below which a second thread costs more than it brings
template <class C>
constexpr int64_t kColumnBlock = 1024 / sizeof(C);
template <class C>
constexpr int64_t kUnit = 256 / sizeof(C);  // columns of the widest panel: threads share out multiples of them

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks of the depth, as equal as multiples of 16 allow.
struct DepthBlocks {
  int64_t depth, count, size;

  explicit DepthBlocks(int64_t depth)
      : depth(depth), count(ceil_div(depth, kDepthBlock)), size(ceil_div(ceil_div(depth, count), 16) * 16) {}
  int64_t first(int64_t block) const { return block * size; }
  int64_t length(int64_t block) const { return std::min(size, depth - first(block)); }
};

// ---- what depends on the element type, or on what is done before and after. A struct with `run` is compiled for each
// kind of CPU, and with_registers takes the one at hand. Loops are over arguments, not over members: those a compiler
// would read again after each store. ----

template <class From, class To>
KF_CPU_INLINE void convert(const From* from, int64_t n, To* to) {
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy(to, from, n * sizeof(To));
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<To>(from[i]);
  }
}

template <class From, class To>
KF_CPU_INLINE void add(const From* from, int64_t n, To* to) {
  for (int64_t i = 0; i < n; ++i) to[i] += static_cast<To>(from[i]);
}

// kBytes bytes of C that begin at p, wherever that is.
template <class C, int kBytes>
struct Vector {
  typedef C type __attribute__((vector_size(kBytes), aligned(alignof(C)), may_alias));
};
template <int kBytes, class C>
KF_CPU_INLINE auto& vector_at(C* p) {
  return *reinterpret_cast<typename Vector<C, kBytes>::type*>(p);
}
template <int kBytes, class C>
KF_CPU_INLINE const auto& vector_at(const C* p) {
  return *reinterpret_cast<const typename Vector<C, kBytes>::type*>(p);
}

// to[r · to_stride + c] = from[r · stride + c], [rows, columns].
template <class T>
struct CopyRows {
  const T* from;
  int64_t stride, rows, columns;
  compute_t<T>* to;
  int64_t to_stride;

  template <int kRows, int kVectors, int kBytes>
  KF_CPU_INLINE void run() const {
    for (int64_t r = 0; r < rows; ++r) convert(from + r * stride, columns, to + r * to_stride);
  }
};

// a0 b0 a1 b1 …: of the first halves of a and b, or of the second. I: integers as wide as V's elements.
template <bool kSecond, class I, class V, int... kLane>
KF_CPU_INLINE void interleave(const V& a, const V& b, V& out, std::integer_sequence<int, kLane...>) {
  constexpr int n = sizeof...(kLane), first = kSecond ? n / 2 : 0;
#ifdef __clang__
  out = __builtin_shufflevector(a, b, (first + kLane / 2 + kLane % 2 * n)...);
#else
  out = __builtin_shuffle(a, b, I{(first + kLane / 2 + kLane % 2 * n)...});
#endif
}

// to[c · to_stride + r] = from[r · stride + c], [rows, columns]. Squares as large as registers are turned within them:
// to interleave the halves of a list of rows is to rotate the bits of (row, lane) by one, and after log2(rows) times
// row and lane have changed places.
template <int kBytes, class C>
KF_CPU_INLINE void transpose(const C* from, int64_t stride, int64_t rows, int64_t columns, C* to, int64_t to_stride) {
  using V = typename Vector<C, kBytes>::type;
  using I = typename Vector<std::conditional_t<sizeof(C) == 8, int64_t, int32_t>, kBytes>::type;
  constexpr int n = kBytes / sizeof(C);
  constexpr auto lanes = std::make_integer_sequence<int, n>();
  for (int64_t r = 0; r < rows; r += n) {
    int64_t c = 0;
    for (; r + n <= rows && c + n <= columns; c += n) {
      V square[n], next[n];
      for (int i = 0; i < n; ++i) square[i] = vector_at<kBytes>(from + (r + i) * stride + c);
      for (int step = 1; step < n; step *= 2) {
        for (int i = 0; i < n / 2; ++i) {
          interleave<false, I>(square[i], square[i + n / 2], next[2 * i], lanes);
          interleave<true, I>(square[i], square[i + n / 2], next[2 * i + 1], lanes);
        }
        for (int i = 0; i < n; ++i) square[i] = next[i];
      }
      for (int i = 0; i < n; ++i) vector_at<kBytes>(to + (c + i) * to_stride + r) = square[i];
    }
    for (; c < columns; ++c) {
      for (int64_t i = r; i < std::min(r + n, rows); ++i) to[c * to_stride + i] = from[i * stride + c];
    }
  }
}

template <class T>
struct Transpose {
  using C = compute_t<T>;
  const T* from;
  int64_t stride, rows, columns;
  C* to;
  int64_t to_stride;

  template <int kRows, int kVectors, int kBytes>
  KF_CPU_INLINE void run() const {
    if constexpr (std::is_same_v<T, C>) {
      transpose<kBytes>(from, stride, rows, columns, to, to_stride);
    } else {  // piece by piece, by way of C
      constexpr int64_t kHigh = 16, kWide = 256;
      alignas(64) C piece[kHigh * kWide];
      for (int64_t r = 0; r < rows; r += kHigh) {
        for (int64_t c = 0; c < columns; c += kWide) {
          const int64_t high = std::min(kHigh, rows - r), wide = std::min(kWide, columns - c);
          for (int64_t i = 0; i < high; ++i) convert(from + (r + i) * stride + c, wide, piece + i * kWide);
          transpose<kBytes>(piece, kWide, high, wide, to + c * to_stride + r, to_stride);
        }
      }
    }
  }
};

// The prologue of rows first to first + rows, [rows, columns] of them at `values`.
template <class C, class Prologue>
struct Begin {
  const Prologue& prologue;
  int64_t first_row, rows, first, columns;
  C* values;
  int64_t stride;

  template <int kRows, int kVectors, int kBytes>
  KF_CPU_INLINE void run() const {
    for (int64_t r = 0; r < rows; ++r) prologue(first_row + r, first, columns, values + r * stride);
  }
};

// Bias, epilogue and rounding of [rows, columns] sums.
template <class T, class Epilogue>
struct Finish {
  using C = compute_t<T>;
  const Product<T>& p;
  const Epilogue& epilogue;
  int64_t first_row, rows, first, columns;
  C* sums;
  int64_t stride;

  template <int kRows, int kVectors, int kBytes>
  KF_CPU_INLINE void run() const {
    for (int64_t r = 0; r < rows; ++r) {
      C* values = sums + r * stride;
      if (p.bias != nullptr) add(p.bias + first, columns, values);
      epilogue(first_row + r, first, columns, values);
      convert(values, columns, p.out + (first_row + r) * p.width + first);
    }
  }
};

// A block of the weight as panels: as many columns as kVectors registers hold side by side, the last ones filled up
// with 0. [length, columns], or, where transposed, [columns, length].
template <class T>
struct PackPanels {
  using C = compute_t<T>;
  const T* weight;
  int64_t stride;
  bool transposed;
  int64_t length, columns;
  C* to;

  template <int kRows, int kVectors, int kBytes>
  KF_CPU_INLINE void run() const {
    constexpr int64_t kWidth = kVectors * kBytes / sizeof(C);
    const int64_t whole = columns / kWidth * kWidth;
    if (whole < columns) std::fill_n(to + whole * length, length * kWidth, C(0));
    if (transposed) {
      for (int64_t c = 0; c < columns; c += kWidth) {
        Transpose<T>{weight + c * stride, stride, std::min(kWidth, columns - c), length, to + c * length, kWidth}
            .template run<kRows, kVectors, kBytes>();
      }
      return;
    }
    for (int64_t k = 0; k < length; ++k) {
      const T* from = weight + k * stride;
      for (int64_t c = 0; c < whole; c += kWidth) convert(from + c, kWidth, to + c * length + k * kWidth);
      convert(from + whole, columns - whole, to + whole * length + k * kWidth);
    }
  }
};

// ---- what is computed in C alone ----

// sums = rows · panels, or sums += rows · panels: [rows, columns] by [rows, length] and [length, columns]. At most
// kRegisterRows rows.
template <class C>
struct MultiplyRows {
  const C* x;
  int64_t x_stride;
  const C* panels;
  C* sums;  // rows kColumnBlock apart; filled to whole panels
  int64_t rows, columns, length;
  bool add;

  template <int kRows, int kVectors, int kBytes>
  KF_CPU_INLINE void run() const {
    if constexpr (kRows > 1) {
      if (rows < kRows) return run<kRows - 1, kVectors, kBytes>();
    }
    constexpr int64_t kWidth = kVectors * kBytes / sizeof(C);
    for (int64_t c = 0; c < columns; c += kWidth) {
      multiply_panel<kRows, kVectors, kBytes>(panels + c * length, sums + c);
    }
  }

  // A block's own sum begins at 0 and is added as a whole: in one long chain a long depth would cost more bits.
  template <int kRows, int kVectors, int kBytes>
  KF_CPU_INLINE void multiply_panel(const C* panel, C* out) const {
    using V = typename Vector<C, kBytes>::type;
    constexpr int64_t n = kBytes / sizeof(C);
    V sum[kRows][kVectors] = {};
    for (int64_t k = 0; k < length; ++k) {
      V row[kVectors];
      for (int j = 0; j < kVectors; ++j) row[j] = vector_at<kBytes>(panel + (k * kVectors + j) * n);
      for (int i = 0; i < kRows; ++i) {
        for (int j = 0; j < kVectors; ++j) sum[i][j] += x[i * x_stride + k] * row[j];
      }
    }
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kVectors; ++j) {
        auto& to = vector_at<kBytes>(out + i * kColumnBlock<C> + j * n);
        to = add ? to + sum[i][j] : sum[i][j];
      }
    }
  }
};

// f.run_rows<n, …>() with n the power of two that is at least `rows`.
template <int kMost, int kVectors, int kBytes, class F>
KF_CPU_INLINE void with_rows(int64_t rows, const F& f) {
  if constexpr (kMost > 1) {
    if (rows <= kMost / 2) return with_rows<kMost / 2, kVectors, kBytes>(rows, f);
  }
  f.template run_rows<kMost, kVectors, kBytes>();
}

// sums[r, c] += Σ x[r, k] · weight[k, c] over kSteps or fewer values of k: [rows, columns], a row of the weight being
// contiguous. Up to the next power of two, rows of x and of sums must be there.
template <class C>
struct AddSteps {
  const C* x;
  int64_t x_stride, rows;
  const C* weight;
  int64_t stride, steps, columns;
  C* sums;  // rows kColumnBlock apart

  template <int kRows, int kVectors, int kBytes>
  KF_CPU_INLINE void run() const {
    with_rows<kFewRows, kVectors, kBytes>(rows, *this);
  }

  template <int kRows, int kVectors, int kBytes>
  KF_CPU_INLINE void run_rows() const {
    int64_t k = 0;
    for (; k + kSteps <= steps; k += kSteps) add<kRows, kSteps, kBytes>(k);
    for (; k < steps; ++k) add<kRows, 1, kBytes>(k);
  }

  template <int kRows, int kCount, int kBytes>
  KF_CPU_INLINE void add(int64_t first) const {
    using V = typename Vector<C, kBytes>::type;
    constexpr int64_t n = kBytes / sizeof(C);
    int64_t c = 0;
    for (; c + n <= columns; c += n) {
      V w[kCount];
      for (int k = 0; k < kCount; ++k) w[k] = vector_at<kBytes>(weight + (first + k) * stride + c);
      for (int r = 0; r < kRows; ++r) {
        V sum = x[r * x_stride + first] * w[0];
        for (int k = 1; k < kCount; ++k) sum += x[r * x_stride + first + k] * w[k];
        vector_at<kBytes>(sums + r * kColumnBlock<C> + c) += sum;
      }
    }
    for (; c < columns; ++c) {
      for (int r = 0; r < kRows; ++r) {
        C sum = 0;
        for (int64_t k = first; k < first + kCount; ++k) sum += x[r * x_stride + k] * weight[k * stride + c];
        sums[r * kColumnBlock<C> + c] += sum;
      }
    }
  }
};

// sums[r, c] = Σ x[r, k] · weight[c, k]: [rows, columns], a column of the weight being contiguous. Each lane of a
// register adds up its own values of k.
template <class C>
struct DotColumns {
  const C* x;
  int64_t x_stride, rows;
  const C* weight;
  int64_t stride, depth, columns;
  C* sums;  // rows kColumnBlock apart

  template <int kRows, int kVectors, int kBytes>
  KF_CPU_INLINE void run() const {
    with_rows<kFewRows, kRows * kVectors, kBytes>(rows, *this);
  }

  template <int kRows, int kRegisters, int kBytes>
  KF_CPU_INLINE void run_rows() const {
    constexpr int kColumns = std::clamp(kRegisters / kRows, 1, 4);
    int64_t c = 0;
    for (; c + kColumns <= columns; c += kColumns) dot<kRows, kColumns, kBytes>(c);
    for (; c < columns; ++c) dot<kRows, 1, kBytes>(c);
  }

  template <int kRows, int kColumns, int kBytes>
  KF_CPU_INLINE void dot(int64_t first) const {
    using V = typename Vector<C, kBytes>::type;
    constexpr int64_t n = kBytes / sizeof(C);
    V sum[kRows][kColumns] = {};
    int64_t whole = 0;
    for (; whole + n <= depth; whole += n) {
      V w[kColumns];
      for (int c = 0; c < kColumns; ++c) w[c] = vector_at<kBytes>(weight + (first + c) * stride + whole);
      for (int r = 0; r < kRows; ++r) {
        const V values = vector_at<kBytes>(x + r * x_stride + whole);
        for (int c = 0; c < kColumns; ++c) sum[r][c] += values * w[c];
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kColumns; ++c) {
        C lanes[n];
        vector_at<kBytes>(lanes) = sum[r][c];
        C total = sum_of(lanes);
        for (int64_t k = whole; k < depth; ++k) total += x[r * x_stride + k] * weight[(first + c) * stride + k];
        sums[r * kColumnBlock<C> + first + c] = total;
      }
    }
  }
};

}  // namespace product_detail
}  // namespace kf::cpu
