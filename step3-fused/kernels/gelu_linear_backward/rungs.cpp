#include "rungs.h"

namespace kf::KF_BACKEND::gelu_linear_backward {
namespace {

constexpr Rung<Args> kRungs[] = {
    {"v1_separate", v1_separate, v1_separate_can_implement, v1_separate_scratch_bytes, "grad · weightᵀ and gelu(x)"},
    {"v2_mma", v2_mma, v2_mma_can_implement, v2_mma_scratch_bytes, "grad · weightᵀ and gelu(x)"},
    {"v3_hopper", v3_hopper, v3_hopper_can_implement, v3_hopper_scratch_bytes, "grad · weightᵀ and gelu(x)"},
};

}  // namespace

Rungs<Args> rungs() { return kRungs; }

}  // namespace kf::KF_BACKEND::gelu_linear_backward
