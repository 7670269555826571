// decode_step in plain C++: rung 0.
#pragma once

#include "kernels/decode_step/rungs.h"

namespace kf::cpu {

void decode_step(const kf::decode_step::Args& args);

}  // namespace kf::cpu
