#include "rungs.h"

namespace kf::KF_BACKEND::gelu_linear {
namespace {

constexpr Rung<Args> kRungs[] = {
    {"v1_separate", v1_separate, v1_separate_can_implement, v1_separate_scratch_bytes, "gelu(x)"},
    {"v3_hopper", v3_hopper, v3_hopper_can_implement, nullptr, "gelu(x)"},
};

}  // namespace

Rungs<Args> rungs() { return kRungs; }

}  // namespace kf::KF_BACKEND::gelu_linear
