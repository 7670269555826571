#include "rungs.h"

namespace kf::KF_BACKEND::layer_norm_linear {
namespace {

constexpr Rung<Args> kRungs[] = {
    {"v1_separate", v1_separate, v1_separate_can_implement, v1_separate_scratch_bytes, "the normalised rows"},
    {"v2_mma", v2_mma, v2_mma_can_implement, v2_mma_scratch_bytes, "the normalised rows"},
    {"v3_hopper", v3_hopper, v3_hopper_can_implement, v3_hopper_scratch_bytes, "the normalised rows"},
};

}  // namespace

Rungs<Args> rungs() { return kRungs; }

}  // namespace kf::KF_BACKEND::layer_norm_linear
