// The two products of a linear layer's backward pass, for rungs of several ops: each takes a rung of linear.
#pragma once

#include <kf/best.h>
#include <step1/column_grid.h>
#include <step1/column_sum.h>

#include <algorithm>

#include "../linear/best.h"

namespace kf::KF_BACKEND::linear_backward {

// What a linear layer's backward pass is about: grad [rows, width], x [rows, depth].
struct Layer {
  const void *grad, *x, *weight;
  void *grad_x, *grad_weight;
  int64_t rows, depth, width;
  bool weight_transposed, tf32;
  DType dtype;
};

template <class Args>
Layer layer_of(const Args& a, const void* grad) {
  return {grad, a.x, a.weight, a.grad_x, a.grad_weight, a.rows, a.depth, a.width, a.weight_transposed, a.tf32, a.dtype};
}

// grad · weightᵀ as linear's arguments.
inline kf::linear::Args product_for_x(const Layer& l) {
  return {l.grad, l.weight, nullptr, l.grad_x, l.rows, l.width, l.depth, false, !l.weight_transposed, l.tf32, l.dtype};
}

// xᵀ · grad, or gradᵀ · x.
inline kf::linear::Args product_for_weight(const Layer& l) {
  const void* const first = l.weight_transposed ? l.grad : l.x;
  const void* const second = l.weight_transposed ? l.x : l.grad;
  const int64_t rows = l.weight_transposed ? l.width : l.depth, width = l.weight_transposed ? l.depth : l.width;
  return {first, second, nullptr, l.grad_weight, rows, l.rows, width, true, false, l.tf32, l.dtype};
}

// Both products by what linear's `auto` takes; one after the other, so they may use the same scratch memory.
inline std::string can_implement(const Layer& l) {
  const std::string for_x = linear::can_implement(product_for_x(l));
  return for_x.empty() ? linear::can_implement(product_for_weight(l)) : for_x;
}

inline int64_t best_scratch_bytes(const Layer& l) {
  const int64_t for_x = linear::best_scratch_bytes(product_for_x(l));
  const int64_t for_weight = linear::best_scratch_bytes(product_for_weight(l));
  return std::max(for_x, for_weight);
}

inline void launch_best(const Layer& l, void* scratch, void* stream) {
  linear::launch_best(product_for_x(l), scratch, stream);
  linear::launch_best(product_for_weight(l), scratch, stream);
}

// The sums of grad's columns, by step 1's two stages; scratch memory for them.
inline int64_t sums_bytes(const Layer& l) { return padded_bytes(partial_sum_bytes(l.rows, l.width, l.dtype)); }

inline void launch_sums(const Layer& l, void* grad_bias, void* scratch, void* stream) {
  with_type(l.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    sum_rows<T>(static_cast<const T*>(l.grad), scratch, grad_bias, l.rows, l.width, stream);
  });
}

// Scratch memory where grad is changed before the products: the changed one, its sums' parts, what the products need.
struct Changed {
  void *grad, *sums, *rest;
};

inline int64_t changed_bytes(const Layer& l) { return padded_bytes(l.rows * l.width * size_of(l.dtype)); }

inline int64_t changed_scratch_bytes(const Layer& l) {
  return changed_bytes(l) + sums_bytes(l) + best_scratch_bytes(l);
}

inline Changed changed_in(void* scratch, const Layer& l) {
  auto* const grad = static_cast<unsigned char*>(scratch);
  return {grad, grad + changed_bytes(l), grad + changed_bytes(l) + sums_bytes(l)};
}

}  // namespace kf::KF_BACKEND::linear_backward
