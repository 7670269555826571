// What the rungs share: which columns a row sees and how it is cut into vectors, as in softmax, and what a vector of
// grad and one of y give.
#pragma once

#include <cuda_runtime.h>
#include <step1/vector.h>

#include "../softmax/row.h"
#include "rungs.h"

namespace kf::KF_BACKEND::softmax_backward {

using softmax::alike;
using softmax::can_implement_a_block_a_row;
using softmax::columns_seen;
using softmax::Cut;
using softmax::hide;
using softmax::vectors_of;

// 16 bytes: in one go, or, where they do not begin at a multiple of 16 bytes, value by value.
template <bool kAligned, class T>
__device__ __forceinline__ int4 bits_from(const T* from) {
  int4 bits;
  if constexpr (kAligned) {
    bits = *reinterpret_cast<const int4*>(from);
  } else {
#pragma unroll
    for (int j = 0; j < static_cast<int>(16 / sizeof(T)); ++j) reinterpret_cast<T*>(&bits)[j] = from[j];
  }
  return bits;
}

// What neighbours from column `first` on give to the row's sum Σ y·grad: those that the row sees.
template <class T, int N = 16 / sizeof(T)>
__device__ __forceinline__ compute_t<T> dot_of(const T* grad, const T* y, int first, int seen) {
  compute_t<T> g[N], product[N];
  widen(load_vector<N>(grad), g);
  widen(load_vector<N>(y), product);
#pragma unroll
  for (int j = 0; j < N; ++j) product[j] *= g[j];
  hide(product, first, seen, compute_t<T>(0));
  compute_t<T> sum = 0;
#pragma unroll
  for (int j = 0; j < N; ++j) sum += product[j];
  return sum;
}

// Their gradients, when `sum` is known; 0 for those that the row does not see.
template <class T, int N>
__device__ __forceinline__ void gradients_of(const T* grad, const T* y, compute_t<T> sum, compute_t<T> scale, int first,
                                             int seen, compute_t<T> (&grad_x)[N]) {
  compute_t<T> g[N];
  widen(load_vector<N>(grad), g);
  widen(load_vector<N>(y), grad_x);
#pragma unroll
  for (int j = 0; j < N; ++j) grad_x[j] = scale * (grad_x[j] * (g[j] - sum));
  hide(grad_x, first, seen, compute_t<T>(0));
}

}  // namespace kf::KF_BACKEND::softmax_backward
