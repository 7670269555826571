#include "rungs.h"

namespace kf::KF_BACKEND::attention {
namespace {

std::string anything(const Args&) { return ""; }

// v1 writes all scores.
int64_t scores_bytes(const Args& a) {
  const int64_t bytes = a.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
  return a.batch * a.heads * a.q_length * a.k_length * bytes;
}

std::string fits_a_block(const Args& a) {
  if (a.dtype == DType::kFloat64) return "takes float32, float16 or bfloat16, got float64";
  if (a.head_dim > 256) return "takes head_dim ≤ 256, got " + std::to_string(a.head_dim);
  const int64_t blocks = a.batch * a.heads * ((a.q_length + 15) / 16);  // at its smallest, a block owns 16 queries
  if (blocks > INT32_MAX) return "takes at most 2147483647 blocks of 16 queries, got " + std::to_string(blocks);
  return "";
}

constexpr Rung<Args> kRungs[] = {
    {"v1_naive", v1_naive, anything, scores_bytes},
    {"v2_tiled", v2_tiled, fits_a_block},
    {"v3_mma", v3_mma, v3_mma_can_implement, nullptr, "the weights"},
    {"v4_pipeline", v4_pipeline, v4_pipeline_can_implement, nullptr, "the weights"},
    {"v5_registers", v5_registers, v5_registers_can_implement, nullptr, "the weights"},
    {"v6_wgmma", v6_wgmma, v6_wgmma_can_implement, nullptr, "the weights"},
    {"v7_warpgroups", v7_warpgroups, v7_warpgroups_can_implement, nullptr, "the weights"},
    {"v8_persistent", v8_persistent, v8_persistent_can_implement, nullptr, "the weights"},
    {"v9_split", v9_split, v9_split_can_implement, nullptr, "the weights"},
};

}  // namespace

Rungs<Args> rungs() { return kRungs; }

}  // namespace kf::KF_BACKEND::attention
