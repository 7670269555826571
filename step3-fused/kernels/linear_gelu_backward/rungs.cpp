#include "rungs.h"

namespace kf::KF_BACKEND::linear_gelu_backward {
namespace {

constexpr Rung<Args> kRungs[] = {
    {"v1_separate", v1_separate, v1_separate_can_implement, v1_separate_scratch_bytes, "grad · gelu'(preactivation)"},
    {"v2_fused", v2_fused, v2_fused_can_implement, v2_fused_scratch_bytes, "grad · gelu'(preactivation)"},
};

}  // namespace

Rungs<Args> rungs() { return kRungs; }

}  // namespace kf::KF_BACKEND::linear_gelu_backward
