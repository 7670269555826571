#include "rungs.h"

namespace kf::KF_BACKEND::layer_norm_backward {
namespace {

constexpr Rung<Args> kRungs[] = {
    {"v1_naive", v1_naive, v1_naive_supports, v1_naive_scratch_bytes},
    {"v2_two_stage", v2_two_stage, v2_two_stage_supports, v2_two_stage_scratch_bytes},
    {"v3_persistent", v3_persistent, v3_persistent_supports, v3_persistent_scratch_bytes},
    {"v4_bulk", v4_bulk, v4_bulk_supports, v4_bulk_scratch_bytes},
};

}  // namespace

Rungs<Args> rungs() { return kRungs; }

}  // namespace kf::KF_BACKEND::layer_norm_backward
