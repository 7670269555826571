#include "rungs.h"

namespace kf::KF_BACKEND::softmax {
namespace {

std::string anything(const Args&) { return ""; }

std::string a_block_a_row(const Args& a) {
  if (a.rows > INT32_MAX) return "takes at most 2147483647 rows, got " + std::to_string(a.rows);
  return "";
}

constexpr Rung<Args> kRungs[] = {
    {"v1_naive", v1_naive, anything},
    {"v2_block", v2_block, a_block_a_row},
    {"v3_online", v3_online, a_block_a_row},
    {"v4_registers", v4_registers, v4_registers_can_implement},
    {"v5_cluster", v5_cluster, v5_cluster_can_implement},
    {"v6_cluster_registers", v6_cluster_registers, v6_cluster_registers_can_implement},
};

}  // namespace

Rungs<Args> rungs() { return kRungs; }

}  // namespace kf::KF_BACKEND::softmax
