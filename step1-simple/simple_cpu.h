// The plain C++ versions of this stage's ops: rung 0.
#pragma once

#include "kernels/bias_gelu/rungs.h"
#include "kernels/scale/rungs.h"

namespace kf::cpu {

void scale(const kf::scale::Args& args);
void bias_gelu(const kf::bias_gelu::Args& args);

}  // namespace kf::cpu
