// The plain C++ versions of this step's ops: rung 0.
#pragma once

#include "kernels/attention_block/rungs.h"
#include "kernels/attention_residual_layer_norm/rungs.h"
#include "kernels/layer_norm/rungs.h"
#include "kernels/layer_norm_backward/rungs.h"
#include "kernels/residual_layer_norm/rungs.h"

namespace kf::cpu {

void layer_norm(const kf::layer_norm::Args& args);
void layer_norm_backward(const kf::layer_norm_backward::Args& args);
void residual_layer_norm(const kf::residual_layer_norm::Args& args);
void attention_residual_layer_norm(const kf::attention_residual_layer_norm::Args& args);
void attention_block(const kf::attention_block::Args& args);

}  // namespace kf::cpu
