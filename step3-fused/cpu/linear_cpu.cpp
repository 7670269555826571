// The ops that fuse something to a matrix product, in plain C++: what each kernel must compute.
//
// What comes before a product or after it is done to its tiles while they are in cache: see step2/product_cpu.h.
#include "cpu/linear_cpu.h"

#include <kf/cpu.h>
#include <step1/dropout_cpu.h>
#include <step1/gelu_cpu.h>
#include <step1/rows_cpu.h>
#include <step2/layer_cpu.h>

#include <vector>

#include "cpu/fused_cpu.h"

namespace kf::cpu {
namespace {

// ---- what happens to neighbours of a row: see step2/product_cpu.h ----

// GELU, whose argument is kept for the backward pass.
template <bool kTanh, class T>
struct KeepThenGelu {
  T* kept;
  int64_t width;

  template <class C>
  KF_CPU_INLINE void operator()(int64_t row, int64_t first, int64_t count, C* values) const {
    T* to = kept + row * width + first;
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(values[i]);
    Gelu<kTanh>{}(row, first, count, values);
  }
};

// times gelu'(x), the way back through GELU.
template <bool kTanh, class T>
struct GeluSlope {
  const T* x;
  int64_t width;

  template <class C>
  KF_CPU_INLINE void operator()(int64_t row, int64_t first, int64_t count, C* values) const {
    const T* from = x + row * width + first;
    C value[kPiece], slope[kPiece];
    for (int64_t begin = 0; begin < count; begin += kPiece) {
      const int64_t n = count - begin < kPiece ? count - begin : kPiece;
      for (int64_t i = 0; i < n; ++i) value[i] = static_cast<C>(from[begin + i]);
      gelu_slopes<kTanh>(value, slope, n);
      for (int64_t i = 0; i < n; ++i) values[begin + i] *= slope[i];
    }
  }
};

// ---- loops over rows ----

template <bool kTanh, class T>
KF_CPU_CLONES void gelu_row(const T* x, T* y, int64_t width) {
  for (int64_t c = 0; c < width; ++c) y[c] = static_cast<T>(gelu_of<kTanh>(static_cast<compute_t<T>>(x[c])));
}

template <bool kTanh, class T>
KF_CPU_CLONES void gelu_backward_row(const T* grad, const T* x, T* grad_x, compute_t<T>* sum, int64_t width) {
  using C = compute_t<T>;
  C value[kPiece], slope[kPiece];
  for (int64_t begin = 0; begin < width; begin += kPiece) {
    const int64_t size = width - begin < kPiece ? width - begin : kPiece;
    for (int64_t i = 0; i < size; ++i) value[i] = static_cast<C>(x[begin + i]);
    gelu_slopes<kTanh>(value, slope, size);
    for (int64_t i = 0; i < size; ++i) {
      value[i] = static_cast<C>(grad[begin + i]) * slope[i];
      grad_x[begin + i] = static_cast<T>(value[i]);
      sum[begin + i] += value[i];
    }
  }
}

// f(Type<T>{}, std::bool_constant<tanh>{})
template <class F>
void with_type_and_tanh(DType dtype, bool tanh, F&& f) {
  with_type(dtype, [&](auto type) { tanh ? f(type, std::true_type{}) : f(type, std::false_type{}); });
}

template <class T>
DropoutResidual<T> dropout_residual_of(const kf::linear_bias_dropout_residual::Args& a) {
  return {static_cast<const T*>(a.residual), a.width, a.seed, a.offset, a.threshold};
}

}  // namespace

void linear_gelu(const kf::linear_gelu::Args& a) {
  with_type_and_tanh(a.dtype, a.tanh, [&](auto type, auto tanh) {
    using T = typename decltype(type)::element;
    constexpr bool kTanh = decltype(tanh)::value;
    const auto kept = static_cast<T*>(a.preactivation);
    kept == nullptr ? product<T>(product_of<T>(a), AsItIs{}, Gelu<kTanh>{})
                    : product<T>(product_of<T>(a), AsItIs{}, KeepThenGelu<kTanh, T>{kept, a.width});
  });
}

void linear_gelu_backward(const kf::linear_gelu_backward::Args& a) {
  with_type_and_tanh(a.dtype, a.tanh, [&](auto type, auto tanh) {
    using T = typename decltype(type)::element;
    Scratch<T> changed(a.rows * a.width);
    sum_rows(a.rows, a.width, static_cast<T*>(a.grad_bias), [&](int64_t begin, int64_t end, compute_t<T>* sum) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t first = row * a.width;
        gelu_backward_row<decltype(tanh)::value>(static_cast<const T*>(a.grad) + first,
                                                 static_cast<const T*>(a.preactivation) + first, changed.data() + first,
                                                 sum, a.width);
      }
    });
    multiply_back<T>(a, changed.data());
  });
}

void gelu_linear(const kf::gelu_linear::Args& a) {
  with_type_and_tanh(a.dtype, a.tanh, [&](auto type, auto tanh) {
    using T = typename decltype(type)::element;
    product<T>(product_of<T>(a), Gelu<decltype(tanh)::value>{});
  });
}

void gelu_linear_backward(const kf::gelu_linear_backward::Args& a) {
  with_type_and_tanh(a.dtype, a.tanh, [&](auto type, auto tanh) {
    using T = typename decltype(type)::element;
    constexpr bool kTanh = decltype(tanh)::value;
    const auto grad = static_cast<const T*>(a.grad), x = static_cast<const T*>(a.x);
    product<T>(product_for_x<T>(a, grad), AsItIs{}, GeluSlope<kTanh, T>{x, a.depth});
    Scratch<T> activation(a.rows * a.depth);
    for_rows(a.rows, a.depth, [&](int64_t begin, int64_t end) {
      gelu_row<kTanh>(x + begin * a.depth, activation.data() + begin * a.depth, (end - begin) * a.depth);
    });
    multiply_for_weight<T>(a, grad, activation.data());
    sum_bias<T>(a, grad);
  });
}

void layer_norm_linear(const kf::layer_norm_linear::Args& a) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    Scratch<T> normalised(a.rows * a.depth);
    layer_norm({a.x, a.norm_weight, a.norm_bias, normalised.data(), a.rows, a.depth, a.eps, a.dtype, a.mean, a.rstd});
    Product<T> p = product_of<T>(a);
    p.x = normalised.data();
    product<T>(p);
  });
}

void linear_bias_dropout_residual(const kf::linear_bias_dropout_residual::Args& a) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    product<T>(product_of<T>(a), AsItIs{}, dropout_residual_of<T>(a));
  });
}

void linear_bias_dropout_residual_backward(const kf::linear_bias_dropout_residual_backward::Args& a) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    Scratch<T> changed(a.rows * a.width);
    sum_rows(a.rows, a.width, static_cast<T*>(a.grad_bias), [&](int64_t begin, int64_t end, compute_t<T>* sum) {
      std::vector<uint16_t> memory;
      for (int64_t row = begin; row < end; ++row) {
        const int64_t first = row * a.width;
        dropout_backward_row(static_cast<const T*>(a.grad) + first, changed.data() + first, sum, a.width,
                             row_numbers(a, row, memory), a.threshold, keep_scale<compute_t<T>>(a.threshold));
      }
    });
    multiply_back<T>(a, changed.data());
  });
}

void mlp(const kf::mlp::Args& a) {
  with_type_and_tanh(a.dtype, a.tanh, [&](auto type, auto tanh) {
    using T = typename decltype(type)::element;
    constexpr bool kTanh = decltype(tanh)::value;
    Scratch<T> activation(a.rows * a.inner);
    const Product<T> first{static_cast<const T*>(a.x),
                           static_cast<const T*>(a.weight_1),
                           static_cast<const T*>(a.bias_1),
                           activation.data(),
                           a.rows,
                           a.width,
                           a.inner,
                           false,
                           a.weight_transposed};
    const auto kept = static_cast<T*>(a.preactivation);
    kept == nullptr ? product<T>(first, AsItIs{}, Gelu<kTanh>{})
                    : product<T>(first, AsItIs{}, KeepThenGelu<kTanh, T>{kept, a.inner});
    const Product<T> second{activation.data(),
                            static_cast<const T*>(a.weight_2),
                            static_cast<const T*>(a.bias_2),
                            static_cast<T*>(a.y),
                            a.rows,
                            a.inner,
                            a.width,
                            false,
                            a.weight_transposed};
    const auto residual = static_cast<const T*>(a.residual);
    residual == nullptr ? product<T>(second)
                        : product<T>(second, AsItIs{}, DropoutResidual<T>{residual, a.width, 0, 0, 0});
  });
}

}  // namespace kf::cpu
