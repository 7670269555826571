#include "../layer_norm/rungs.h"
#include "rungs.h"

namespace kf::KF_BACKEND::residual_layer_norm {
namespace {

std::string v1_separate_can_implement(const Args& a) {
  layer_norm::Args second{};
  second.rows = a.rows;
  return layer_norm::v1_naive_can_implement(second);
}

constexpr Rung<Args> kRungs[] = {
    {"v1_separate", v1_separate, v1_separate_can_implement, nullptr, "the sum"},
    {"v2_fused", v2_fused, v2_fused_can_implement},
    {"v3_registers", v3_registers, v3_registers_can_implement},
    {"v4_cluster", v4_cluster, v4_cluster_can_implement},
};

}  // namespace

Rungs<Args> rungs() { return kRungs; }

}  // namespace kf::KF_BACKEND::residual_layer_norm
