// gelu.h in plain C++: x · gate(x) and its slope, in a form that compilers vectorise.
#pragma once

#include <step1/vectorised_cpu.h>

#include <cstdint>

namespace kf::cpu {

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

}  // namespace kf::cpu
