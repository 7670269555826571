// embedding_backward in plain C++: rung 0.
#pragma once

#include "kernels/embedding_backward/rungs.h"

namespace kf::cpu {

void embedding_backward(const kf::embedding_backward::Args& args);

}  // namespace kf::cpu
