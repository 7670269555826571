// What the rungs share: the product that leads back through the weight, its epilogue, and what is done with gelu(x).
#pragma once

#include <step1/column_sum.h>
#include <step3/epilogues.h>

#include <linear_backward/gradients.h>
#include "rungs.h"

namespace kf::KF_BACKEND::gelu_linear_backward {

using linear_backward::Layer;

inline Layer layer_of(const Args& a) { return linear_backward::layer_of(a, a.grad); }

// grad · weightᵀ as the products on tensor cores take it.
inline Product product_of(const Args& a) { return {a.grad, a.weight, nullptr, a.rows, a.width, a.depth}; }
inline Major major_of_weight(const Args& a) { return a.weight_transposed ? Major::kMN : Major::kK; }

// Scratch memory: gelu(x), and then what the sums and the other product need.
inline int64_t activation_bytes(const Args& a) { return padded_bytes(a.rows * a.depth * size_of(a.dtype)); }

inline kf::linear::Args product_for_weight(const Args& a, const void* activation) {
  Layer layer = layer_of(a);
  layer.x = activation;
  return linear_backward::product_for_weight(layer);
}

inline int64_t rest_bytes(const Args& a) {
  return linear_backward::sums_bytes(layer_of(a)) + linear::best_scratch_bytes(product_for_weight(a, a.x));
}

// The gradients of weight and bias, `rest`: where gelu(x) ends.
inline void launch_rest(const Args& a, const void* activation, void* rest, void* stream) {
  auto* const sums = static_cast<unsigned char*>(rest);
  linear::launch_best(product_for_weight(a, activation), sums + linear_backward::sums_bytes(layer_of(a)), stream);
  linear_backward::launch_sums(layer_of(a), a.grad_bias, sums, stream);
}

template <class T, bool kTanh>
GeluSlopeEpilogue<T, kTanh> epilogue_of(const Args& a) {
  return {Rows<T>(a.grad_x, a.rows, a.depth), Rows<T>(a.x, a.rows, a.depth), Rows<T>(a.scratch, a.rows, a.depth)};
}

// Calls f(weight, epilogue) with the Major of the transposed weight as a constant.
template <class T, class F>
void with_epilogue(const Args& a, F&& f) {
  with_major_of_weight(!a.weight_transposed, [&](auto weight) {
    a.tanh ? f(weight, epilogue_of<T, true>(a)) : f(weight, epilogue_of<T, false>(a));
  });
}

}  // namespace kf::KF_BACKEND::gelu_linear_backward
