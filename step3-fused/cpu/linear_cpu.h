// The plain C++ versions of the ops that fuse something to a matrix product: rung 0.
#pragma once

#include "kernels/gelu_linear/rungs.h"
#include "kernels/gelu_linear_backward/rungs.h"
#include "kernels/layer_norm_linear/rungs.h"
#include "kernels/linear_bias_dropout_residual/rungs.h"
#include "kernels/linear_bias_dropout_residual_backward/rungs.h"
#include "kernels/linear_gelu/rungs.h"
#include "kernels/linear_gelu_backward/rungs.h"
#include "kernels/mlp/rungs.h"

namespace kf::cpu {

void linear_gelu(const kf::linear_gelu::Args& args);
void linear_gelu_backward(const kf::linear_gelu_backward::Args& args);
void gelu_linear(const kf::gelu_linear::Args& args);
void gelu_linear_backward(const kf::gelu_linear_backward::Args& args);
void layer_norm_linear(const kf::layer_norm_linear::Args& args);
void linear_bias_dropout_residual(const kf::linear_bias_dropout_residual::Args& args);
void linear_bias_dropout_residual_backward(const kf::linear_bias_dropout_residual_backward::Args& args);
void mlp(const kf::mlp::Args& args);

}  // namespace kf::cpu
