// The plain C++ versions of this step's ops: rung 0.
#pragma once

#include "kernels/embedding/rungs.h"
#include "kernels/kv_append/rungs.h"

namespace kf::cpu {

void embedding(const kf::embedding::Args& args);
void kv_append(const kf::kv_append::Args& args);

}  // namespace kf::cpu
