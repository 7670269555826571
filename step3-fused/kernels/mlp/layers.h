// The two layers of an MLP as the ops that compute them take them.
#pragma once

#include <kf/best.h>

#include <algorithm>

#include <linear/rungs.h>
#include "../linear_bias_dropout_residual/rungs.h"
#include "../linear_gelu/rungs.h"
#include "rungs.h"

namespace kf::KF_BACKEND::mlp {

// Scratch memory: what lies between the layers, and behind it what a layer's rung needs.
inline int64_t activation_bytes(const Args& a) { return padded_bytes(a.rows * a.inner * size_of(a.dtype)); }

inline kf::linear_gelu::Args first_layer(const Args& a) {
  kf::linear_gelu::Args layer{};
  layer.x = a.x, layer.weight = a.weight_1, layer.bias = a.bias_1;
  layer.y = a.scratch, layer.preactivation = a.preactivation;
  layer.tanh = a.tanh;
  layer.rows = a.rows, layer.depth = a.width, layer.width = a.inner;
  layer.weight_transposed = a.weight_transposed, layer.tf32 = a.tf32, layer.dtype = a.dtype;
  layer.scratch = static_cast<unsigned char*>(a.scratch) + activation_bytes(a);
  return layer;
}

inline kf::linear_bias_dropout_residual::Args second_layer(const Args& a) {
  kf::linear_bias_dropout_residual::Args layer{};  // its threshold of 0 drops nothing
  layer.x = a.scratch, layer.weight = a.weight_2, layer.bias = a.bias_2;
  layer.residual = a.residual, layer.y = a.y;
  layer.rows = a.rows, layer.depth = a.inner, layer.width = a.width;
  layer.weight_transposed = a.weight_transposed, layer.tf32 = a.tf32, layer.dtype = a.dtype;
  layer.scratch = static_cast<unsigned char*>(a.scratch) + activation_bytes(a);
  return layer;
}

// The same without a residual.
inline kf::linear::Args plain_second_layer(const Args& a) {
  return {a.scratch, a.weight_2, a.bias_2,
          a.y,       a.rows,     a.inner,
          a.width,   false,      a.weight_transposed,
          a.tf32,    a.dtype,    static_cast<unsigned char*>(a.scratch) + activation_bytes(a)};
}

}  // namespace kf::KF_BACKEND::mlp
