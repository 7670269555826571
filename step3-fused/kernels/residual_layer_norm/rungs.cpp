#include "rungs.h"

namespace kf::KF_BACKEND::residual_layer_norm {
namespace {

// layer_norm's v1_naive has eight rows a block.
std::string eight_rows_a_block(const Args& a) {
  constexpr int64_t kMost = int64_t{8} * INT32_MAX;
  return a.rows <= kMost ? "" : "takes rows ≤ " + std::to_string(kMost) + ", got " + std::to_string(a.rows);
}

constexpr Rung<Args> kRungs[] = {
    {"v1_separate", v1_separate, eight_rows_a_block, nullptr, "the sum"},
    {"v2_fused", v2_fused, v2_fused_supports},
};

}  // namespace

Rungs<Args> rungs() { return kRungs; }

}  // namespace kf::KF_BACKEND::residual_layer_norm
