#include "rungs.h"

namespace kf::KF_BACKEND::residual_layer_norm {
namespace {

std::string anything(const Args&) { return ""; }

constexpr Rung<Args> kRungs[] = {
    {"v1_separate", v1_separate, anything},
    {"v2_fused", v2_fused, v2_fused_supports},
};

}  // namespace

Rungs<Args> rungs() { return {kRungs, 2}; }

}  // namespace kf::KF_BACKEND::residual_layer_norm
