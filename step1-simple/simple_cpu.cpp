// The same ops in plain C++: what each kernel must compute, written as the loop it replaces.
#include "simple_cpu.h"

#include <kf/cpu.h>
#include <step1/philox_cpu.h>
#include <step1/vectorised_cpu.h>

#include <algorithm>
#include <array>
#include <vector>

namespace kf::cpu {
namespace {

constexpr int64_t kGrain = 1 << 14;  // elements below which a second thread costs more than it brings

// ---- GELU: x * gate(x), and its slope ----

// (1 + tanh u)/2 with u = sqrt(2/π)·(x + 0.044715 x³), written as 1 / (1 + exp(-2u)): the same, with one exp.
template <class C>
KF_CPU_INLINE C tanh_gate(C x) {
  return C(1) / (C(1) + vector_exp(C(-1.59576912160573071176) * (x + C(0.044715) * x * x * x)));
}

template <class C>
KF_CPU_INLINE C erf_gate(C x) {
  return C(0.5) * vector_erfc(-x * C(0.70710678118654752440));
}

template <bool kTanh, class C>
KF_CPU_INLINE C gelu_of(C x) {
  return x * (kTanh ? tanh_gate(x) : erf_gate(x));
}

template <bool kTanh, class C>
KF_CPU_INLINE C gelu_slope(C x) {
  if constexpr (kTanh) {
    const C s = tanh_gate(x);
    return s + s * (C(1) - s) * x * C(1.59576912160573071176) * (C(1) + C(0.134145) * x * x);
  } else {
    return erf_gate(x) + x * C(0.39894228040143267794) * vector_exp(C(-0.5) * x * x);
  }
}

// The slopes at x[0..n), n ≤ kPiece. Beyond 16 they are 0 or 1, and x³ would overflow into inf - inf; NaN must stay. In
// one loop GCC makes a branch of the bound and of NaN, and then no vector instructions; through memory it cannot.
constexpr int kPiece = 64;

template <bool kTanh, class C>
KF_CPU_INLINE void gelu_slopes(const C* x, C* slope, int64_t n) {
  for (int64_t i = 0; i < n; ++i) slope[i] = x[i] > C(-16) ? (x[i] < C(16) ? x[i] : C(16)) : C(-16);
  for (int64_t i = 0; i < n; ++i) slope[i] = gelu_slope<kTanh>(slope[i]);
  for (int64_t i = 0; i < n; ++i) slope[i] = x[i] == x[i] ? slope[i] : x[i];
}

// ---- loops over contiguous memory, each compiled for several instruction sets ----

template <class T>
KF_CPU_CLONES void scale_part(const T* x, T* y, int64_t n, compute_t<T> factor) {
  for (int64_t i = 0; i < n; ++i) y[i] = static_cast<T>(factor * static_cast<compute_t<T>>(x[i]));
}

template <bool kTanh, class T>
KF_CPU_CLONES void gelu_part(const T* x, T* y, int64_t n, compute_t<T> factor) {
  for (int64_t i = 0; i < n; ++i) y[i] = static_cast<T>(factor * gelu_of<kTanh>(static_cast<compute_t<T>>(x[i])));
}

template <bool kTanh, class T>
KF_CPU_CLONES void gelu_backward_part(const T* grad, const T* x, T* grad_x, int64_t n, compute_t<T> factor) {
  using C = compute_t<T>;
  C value[kPiece], slope[kPiece];
  for (int64_t begin = 0; begin < n; begin += kPiece) {
    const int64_t size = n - begin < kPiece ? n - begin : kPiece;
    for (int64_t i = 0; i < size; ++i) value[i] = static_cast<C>(x[begin + i]);
    gelu_slopes<kTanh>(value, slope, size);
    for (int64_t i = 0; i < size; ++i) {
      grad_x[begin + i] = static_cast<T>(factor * static_cast<C>(grad[begin + i]) * slope[i]);
    }
  }
}

template <bool kTanh, class T>
KF_CPU_CLONES void bias_gelu_row(const T* x, const T* bias, T* y, int64_t width) {
  using C = compute_t<T>;
  for (int64_t c = 0; c < width; ++c) {
    y[c] = static_cast<T>(gelu_of<kTanh>(static_cast<C>(x[c]) + static_cast<C>(bias[c])));
  }
}

template <bool kTanh, class T>
KF_CPU_CLONES void bias_gelu_backward_row(const T* grad, const T* x, const T* bias, T* grad_x, compute_t<T>* sum,
                                          int64_t width) {
  using C = compute_t<T>;
  C value[kPiece], slope[kPiece];
  for (int64_t begin = 0; begin < width; begin += kPiece) {
    const int64_t size = width - begin < kPiece ? width - begin : kPiece;
    for (int64_t i = 0; i < size; ++i) value[i] = static_cast<C>(x[begin + i]) + static_cast<C>(bias[begin + i]);
    gelu_slopes<kTanh>(value, slope, size);
    for (int64_t i = 0; i < size; ++i) {
      value[i] = static_cast<C>(grad[begin + i]) * slope[i];
      grad_x[begin + i] = static_cast<T>(value[i]);
      sum[begin + i] += value[i];
    }
  }
}

template <class T>
KF_CPU_CLONES void add_row(const T* x, compute_t<T>* sum, int64_t width) {
  for (int64_t c = 0; c < width; ++c) sum[c] += static_cast<compute_t<T>>(x[c]);
}

// ---- dropout ----

// The numbers of a row's elements, in memory that is used again for the next row.
template <class Args>
const uint16_t* row_numbers(const Args& a, int64_t row, std::vector<uint16_t>& memory) {
  const int64_t first = row * a.width, calls = (first + a.width - 1) / 8 - first / 8 + 1;
  memory.resize(static_cast<size_t>((calls + kPhiloxLanes) * 8));
  philox(a.seed, a.offset, static_cast<uint64_t>(first / 8), calls, memory.data());
  return memory.data() + first % 8;
}

template <class T>
KF_CPU_CLONES void bias_dropout_residual_row(const T* x, const T* bias, const T* residual, T* y, int64_t width,
                                             const uint16_t* numbers, uint32_t threshold, compute_t<T> scale) {
  using C = compute_t<T>;
  for (int64_t c = 0; c < width; ++c) {
    const C value = scale * (static_cast<C>(x[c]) + static_cast<C>(bias[c]));
    y[c] = static_cast<T>((numbers[c] >= threshold ? value : C(0)) + static_cast<C>(residual[c]));
  }
}

template <class T>
KF_CPU_CLONES void dropout_backward_row(const T* grad, T* grad_x, compute_t<T>* sum, int64_t width,
                                        const uint16_t* numbers, uint32_t threshold, compute_t<T> scale) {
  using C = compute_t<T>;
  for (int64_t c = 0; c < width; ++c) {
    const C product = scale * static_cast<C>(grad[c]);
    const C value = numbers[c] >= threshold ? product : C(0);
    grad_x[c] = static_cast<T>(value);
    sum[c] += value;
  }
}

// ---- who does which part ----

template <class F>
void for_rows(int64_t rows, int64_t width, F&& f) {
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / width), [&](int64_t begin, int64_t end) { f(begin, end); });
}

// sum[c] over all rows, where add(begin, end, partial) adds rows to their part's sums. The parts depend on the shape
// alone, not on the number of threads, and are added in order: the same bits in every run.
template <class T, class F>
void sum_rows(int64_t rows, int64_t width, T* sum, F&& add) {
  using C = compute_t<T>;
  const int64_t parts = std::min<int64_t>(rows, 32);
  std::vector<C> partial(static_cast<size_t>(parts * width), C(0));
  at::parallel_for(0, parts, std::max<int64_t>(1, kGrain * parts / (rows * width)), [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      add(part * rows / parts, (part + 1) * rows / parts, partial.data() + part * width);
    }
  });
  for (int64_t part = 1; part < parts; ++part) add_row(partial.data() + part * width, partial.data(), width);
  for (int64_t c = 0; c < width; ++c) sum[c] = static_cast<T>(partial[static_cast<size_t>(c)]);
}

// f(Type<T>{}, std::bool_constant<tanh>{})
template <class F>
void with_type_and_tanh(DType dtype, bool tanh, F&& f) {
  with_type(dtype, [&](auto type) { tanh ? f(type, std::true_type{}) : f(type, std::false_type{}); });
}

}  // namespace

void scale(const kf::scale::Args& a) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    at::parallel_for(0, a.n, kGrain, [&](int64_t begin, int64_t end) {
      scale_part(static_cast<const T*>(a.x) + begin, static_cast<T*>(a.y) + begin, end - begin,
                 static_cast<compute_t<T>>(a.factor));
    });
  });
}

void gelu(const kf::gelu::Args& a) { gelu_scale({a.x, a.y, a.n, 1.0, a.tanh, a.dtype}); }

void gelu_scale(const kf::gelu_scale::Args& a) {
  with_type_and_tanh(a.dtype, a.tanh, [&](auto type, auto tanh) {
    using T = typename decltype(type)::element;
    at::parallel_for(0, a.n, kGrain, [&](int64_t begin, int64_t end) {
      gelu_part<decltype(tanh)::value>(static_cast<const T*>(a.x) + begin, static_cast<T*>(a.y) + begin, end - begin,
                                       static_cast<compute_t<T>>(a.factor));
    });
  });
}

void gelu_backward(const kf::gelu_backward::Args& a) {
  with_type_and_tanh(a.dtype, a.tanh, [&](auto type, auto tanh) {
    using T = typename decltype(type)::element;
    at::parallel_for(0, a.n, kGrain, [&](int64_t begin, int64_t end) {
      gelu_backward_part<decltype(tanh)::value>(static_cast<const T*>(a.grad) + begin,
                                                static_cast<const T*>(a.x) + begin, static_cast<T*>(a.grad_x) + begin,
                                                end - begin, static_cast<compute_t<T>>(a.factor));
    });
  });
}

void bias_gelu(const kf::bias_gelu::Args& a) {
  with_type_and_tanh(a.dtype, a.tanh, [&](auto type, auto tanh) {
    using T = typename decltype(type)::element;
    for_rows(a.rows, a.width, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        bias_gelu_row<decltype(tanh)::value>(static_cast<const T*>(a.x) + row * a.width, static_cast<const T*>(a.bias),
                                             static_cast<T*>(a.y) + row * a.width, a.width);
      }
    });
  });
}

void bias_gelu_backward(const kf::bias_gelu_backward::Args& a) {
  with_type_and_tanh(a.dtype, a.tanh, [&](auto type, auto tanh) {
    using T = typename decltype(type)::element;
    sum_rows(a.rows, a.width, static_cast<T*>(a.grad_bias), [&](int64_t begin, int64_t end, compute_t<T>* sum) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t first = row * a.width;
        bias_gelu_backward_row<decltype(tanh)::value>(static_cast<const T*>(a.grad) + first,
                                                      static_cast<const T*>(a.x) + first, static_cast<const T*>(a.bias),
                                                      static_cast<T*>(a.grad_x) + first, sum, a.width);
      }
    });
  });
}

void bias_dropout_residual(const kf::bias_dropout_residual::Args& a) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    for_rows(a.rows, a.width, [&](int64_t begin, int64_t end) {
      std::vector<uint16_t> memory;
      for (int64_t row = begin; row < end; ++row) {
        const int64_t first = row * a.width;
        bias_dropout_residual_row(static_cast<const T*>(a.x) + first, static_cast<const T*>(a.bias),
                                  static_cast<const T*>(a.residual) + first, static_cast<T*>(a.y) + first, a.width,
                                  row_numbers(a, row, memory), a.threshold, keep_scale<compute_t<T>>(a.threshold));
      }
    });
  });
}

void bias_dropout_residual_backward(const kf::bias_dropout_residual_backward::Args& a) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    sum_rows(a.rows, a.width, static_cast<T*>(a.grad_bias), [&](int64_t begin, int64_t end, compute_t<T>* sum) {
      std::vector<uint16_t> memory;
      for (int64_t row = begin; row < end; ++row) {
        const int64_t first = row * a.width;
        dropout_backward_row(static_cast<const T*>(a.grad) + first, static_cast<T*>(a.grad_x) + first, sum, a.width,
                             row_numbers(a, row, memory), a.threshold, keep_scale<compute_t<T>>(a.threshold));
      }
    });
  });
}

void column_sum(const kf::column_sum::Args& a) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    sum_rows(a.rows, a.width, static_cast<T*>(a.sum), [&](int64_t begin, int64_t end, compute_t<T>* sum) {
      for (int64_t row = begin; row < end; ++row) add_row(static_cast<const T*>(a.x) + row * a.width, sum, a.width);
    });
  });
}

}  // namespace kf::cpu
