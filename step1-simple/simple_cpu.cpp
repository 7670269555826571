// The same ops in plain C++: what each kernel must compute, written as the loop it replaces.
#include "simple_cpu.h"

#include <kf/cpu.h>
#include <step1/vectorised_cpu.h>

#include <algorithm>

namespace kf::cpu {
namespace {

constexpr int64_t kGrain = 1 << 14;  // elements below which a second thread costs more than it brings

// x·(1 + tanh u)/2 with u = sqrt(2/π)·(x + 0.044715 x³), written as x / (1 + exp(-2u)): the same, with one exp.
template <class C>
KF_CPU_INLINE C gelu_tanh(C x) {
  return x / (C(1) + vector_exp(C(-1.59576912160573071176) * (x + C(0.044715) * x * x * x)));
}

template <class C>
KF_CPU_INLINE C gelu_erf(C x) {
  return C(0.5) * x * vector_erfc(-x * C(0.70710678118654752440));
}

template <class T>
KF_CPU_CLONES void scale_part(const T* x, T* y, int64_t n, compute_t<T> factor) {
  for (int64_t i = 0; i < n; ++i) y[i] = static_cast<T>(factor * static_cast<compute_t<T>>(x[i]));
}

template <class T>
KF_CPU_CLONES void bias_gelu_row(const T* x, const T* bias, T* y, int64_t width, bool tanh) {
  using C = compute_t<T>;
  if (tanh) {
    for (int64_t c = 0; c < width; ++c) {
      y[c] = static_cast<T>(gelu_tanh(static_cast<C>(x[c]) + static_cast<C>(bias[c])));
    }
  } else {
    for (int64_t c = 0; c < width; ++c) {
      y[c] = static_cast<T>(gelu_erf(static_cast<C>(x[c]) + static_cast<C>(bias[c])));
    }
  }
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

void bias_gelu(const kf::bias_gelu::Args& a) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    at::parallel_for(0, a.rows, std::max<int64_t>(1, kGrain / a.width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        bias_gelu_row(static_cast<const T*>(a.x) + row * a.width, static_cast<const T*>(a.bias),
                      static_cast<T*>(a.y) + row * a.width, a.width, a.tanh);
      }
    });
  });
}

}  // namespace kf::cpu
