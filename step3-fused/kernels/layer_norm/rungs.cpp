#include "rungs.h"

namespace kf::KF_BACKEND::layer_norm {

std::string v1_naive_can_implement(const Args& a) {
  constexpr int64_t kMost = int64_t{8} * INT32_MAX;  // eight rows a block
  return a.rows <= kMost ? "" : "takes rows ≤ " + std::to_string(kMost) + ", got " + std::to_string(a.rows);
}

namespace {

constexpr Rung<Args> kRungs[] = {
    {"v1_naive", v1_naive, v1_naive_can_implement},
    {"v2_block", v2_block, v2_block_can_implement},
    {"v3_registers", v3_registers, v3_registers_can_implement},
    {"v4_cluster", v4_cluster, v4_cluster_can_implement},
};

}  // namespace

Rungs<Args> rungs() { return kRungs; }

}  // namespace kf::KF_BACKEND::layer_norm
