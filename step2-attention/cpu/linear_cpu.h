// The plain C++ version of the matrix product: rung 0.
#pragma once

#include "kernels/linear/rungs.h"
#include "kernels/linear_backward/rungs.h"

namespace kf::cpu {

void linear(const kf::linear::Args& args);
void linear_backward(const kf::linear_backward::Args& args);

}  // namespace kf::cpu
