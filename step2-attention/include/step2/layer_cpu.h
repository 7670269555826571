// The products of a layer and of its backward pass in plain C++, as all ops around a matrix product take them.
#pragma once

#include <kf/cpu.h>
#include <step1/rows_cpu.h>
#include <step2/product_cpu.h>

namespace kf::cpu {

// x · weight + bias into y.
template <class T, class Args>
Product<T> product_of(const Args& a) {
  return {static_cast<const T*>(a.x),
          static_cast<const T*>(a.weight),
          static_cast<const T*>(a.bias),
          static_cast<T*>(a.y),
          a.rows,
          a.depth,
          a.width,
          false,
          a.weight_transposed};
}

// grad · weightᵀ
template <class T, class Args>
Product<T> product_for_x(const Args& a, const T* grad) {
  return {grad,
          static_cast<const T*>(a.weight),
          nullptr,
          static_cast<T*>(a.grad_x),
          a.rows,
          a.width,
          a.depth,
          false,
          !a.weight_transposed};
}

// xᵀ · grad, or, where the weight is transposed, gradᵀ · x.
template <class T, class Args>
void multiply_for_weight(const Args& a, const T* grad, const T* x) {
  const auto to = static_cast<T*>(a.grad_weight);
  product<T>(a.weight_transposed ? Product<T>{grad, x, nullptr, to, a.width, a.rows, a.depth, true, false}
                                 : Product<T>{x, grad, nullptr, to, a.depth, a.rows, a.width, true, false});
}

template <class T, class Args>
void sum_bias(const Args& a, const T* grad) {
  sum_rows(a.rows, a.width, static_cast<T*>(a.grad_bias), [&](int64_t begin, int64_t end, compute_t<T>* sum) {
    for (int64_t row = begin; row < end; ++row) add_row(grad + row * a.width, sum, a.width);
  });
}

// Both products, for a gradient that was changed and whose columns were summed.
template <class T, class Args>
void multiply_back(const Args& a, const T* grad) {
  product<T>(product_for_x<T>(a, grad));
  multiply_for_weight<T>(a, grad, static_cast<const T*>(a.x));
}

}  // namespace kf::cpu
