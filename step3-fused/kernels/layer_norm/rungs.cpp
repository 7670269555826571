#include "rungs.h"

namespace kf::KF_BACKEND::layer_norm {
namespace {

// layer_norm's v1_naive has eight rows a block.
std::string eight_rows_a_block(const Args& a) {
  constexpr int64_t kMost = int64_t{8} * INT32_MAX;
  return a.rows <= kMost ? "" : "takes rows ≤ " + std::to_string(kMost) + ", got " + std::to_string(a.rows);
}

constexpr Rung<Args> kRungs[] = {
    {"v1_naive", v1_naive, eight_rows_a_block},
    {"v2_block", v2_block, v2_block_supports},
};

}  // namespace

Rungs<Args> rungs() { return kRungs; }

}  // namespace kf::KF_BACKEND::layer_norm
