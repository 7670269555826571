// The same ops in plain C++: what each kernel must compute, written as the loop it replaces.
#include "cpu/simple_cpu.h"

#include <kf/cpu.h>
#include <step1/dropout_cpu.h>
#include <step1/gelu_cpu.h>
#include <step1/rows_cpu.h>
#include <step1/vectorised_cpu.h>

#include <algorithm>
#include <array>
#include <vector>

namespace kf::cpu {
namespace {

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

// ---- dropout ----

template <class T>
KF_CPU_CLONES void bias_dropout_residual_row(const T* x, const T* bias, const T* residual, T* y, int64_t width,
                                             const uint16_t* numbers, uint32_t threshold, compute_t<T> scale) {
  using C = compute_t<T>;
  for (int64_t c = 0; c < width; ++c) {
    const C value = scale * (static_cast<C>(x[c]) + static_cast<C>(bias[c]));
    y[c] = static_cast<T>((numbers[c] >= threshold ? value : C(0)) + static_cast<C>(residual[c]));
  }
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
    parallel_for(0, a.n, kGrain, [&](int64_t begin, int64_t end) {
      scale_part(static_cast<const T*>(a.x) + begin, static_cast<T*>(a.y) + begin, end - begin,
                 static_cast<compute_t<T>>(a.factor));
    });
  });
}

void gelu(const kf::gelu::Args& a) { gelu_scale({a.x, a.y, a.n, 1.0, a.tanh, a.dtype}); }

void gelu_scale(const kf::gelu_scale::Args& a) {
  with_type_and_tanh(a.dtype, a.tanh, [&](auto type, auto tanh) {
    using T = typename decltype(type)::element;
    parallel_for(0, a.n, kGrain, [&](int64_t begin, int64_t end) {
      gelu_part<decltype(tanh)::value>(static_cast<const T*>(a.x) + begin, static_cast<T*>(a.y) + begin, end - begin,
                                       static_cast<compute_t<T>>(a.factor));
    });
  });
}

void gelu_backward(const kf::gelu_backward::Args& a) {
  with_type_and_tanh(a.dtype, a.tanh, [&](auto type, auto tanh) {
    using T = typename decltype(type)::element;
    parallel_for(0, a.n, kGrain, [&](int64_t begin, int64_t end) {
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
