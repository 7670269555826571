#include "rungs.h"

namespace kf::KF_BACKEND::softmax_backward {
namespace {

std::string anything(const Args&) { return ""; }

std::string a_block_a_row(const Args& a) {
  if (a.rows > INT32_MAX) return "takes at most 2147483647 rows, got " + std::to_string(a.rows);
  return "";
}

constexpr Rung<Args> kRungs[] = {
    {"v1_naive", v1_naive, anything},
    {"v2_block", v2_block, a_block_a_row},
    {"v3_registers", v3_registers, v3_registers_can_implement},
    {"v4_cluster", v4_cluster, v4_cluster_can_implement},
};

}  // namespace

Rungs<Args> rungs() { return kRungs; }

}  // namespace kf::KF_BACKEND::softmax_backward
