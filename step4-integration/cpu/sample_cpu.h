// sample in plain C++: rung 0.
#pragma once

#include "kernels/sample/rungs.h"

namespace kf::cpu {

void sample(const kf::sample::Args& args);

}  // namespace kf::cpu
