#include "rungs.h"

namespace kf::KF_BACKEND::gelu_linear {
namespace {

constexpr Rung<Args> kRungs[] = {
    {"v1_separate", v1_separate, v1_separate_supports, v1_separate_scratch_bytes, "gelu(x)"},
    {"v2_mma", v2_mma, v2_mma_supports, nullptr, "gelu(x)"},
    {"v3_hopper", v3_hopper, v3_hopper_supports, nullptr, "gelu(x)"},
};

}  // namespace

Rungs<Args> rungs() { return kRungs; }

}  // namespace kf::KF_BACKEND::gelu_linear
