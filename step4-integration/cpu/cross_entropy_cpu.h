// The plain C++ version of cross_entropy: rung 0.
#pragma once

#include "kernels/cross_entropy/rungs.h"

namespace kf::cpu {

void cross_entropy(const kf::cross_entropy::Args& args);

}  // namespace kf::cpu
