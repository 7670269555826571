// The plain C++ versions of this stage's ops: rung 0.
#pragma once

#include "kernels/attention/rungs.h"
#include "kernels/softmax/rungs.h"

namespace kf::cpu {

void softmax(const kf::softmax::Args& args);
void attention(const kf::attention::Args& args);

}  // namespace kf::cpu
