// The plain C++ versions of this step's ops: rung 0.
#pragma once

#include "kernels/bias_dropout_residual/rungs.h"
#include "kernels/bias_dropout_residual_backward/rungs.h"
#include "kernels/bias_gelu/rungs.h"
#include "kernels/bias_gelu_backward/rungs.h"
#include "kernels/column_sum/rungs.h"
#include "kernels/gelu/rungs.h"
#include "kernels/gelu_backward/rungs.h"
#include "kernels/gelu_scale/rungs.h"
#include "kernels/scale/rungs.h"

namespace kf::cpu {

void scale(const kf::scale::Args& args);
void gelu(const kf::gelu::Args& args);
void gelu_backward(const kf::gelu_backward::Args& args);
void gelu_scale(const kf::gelu_scale::Args& args);
void bias_gelu(const kf::bias_gelu::Args& args);
void bias_gelu_backward(const kf::bias_gelu_backward::Args& args);
void bias_dropout_residual(const kf::bias_dropout_residual::Args& args);
void bias_dropout_residual_backward(const kf::bias_dropout_residual_backward::Args& args);
void column_sum(const kf::column_sum::Args& args);

}  // namespace kf::cpu
