#include "rungs.h"

namespace kf::KF_BACKEND::layer_norm_backward {
namespace {

constexpr Rung<Args> kRungs[] = {
    {"v1_naive", v1_naive, v1_naive_can_implement, v1_naive_scratch_bytes},
    {"v2_two_stage", v2_two_stage, v2_two_stage_can_implement, v2_two_stage_scratch_bytes},
    {"v3_persistent", v3_persistent, v3_persistent_can_implement, v3_persistent_scratch_bytes},
    {"v4_bulk", v4_bulk, v4_bulk_can_implement, v4_bulk_scratch_bytes},
};

}  // namespace

Rungs<Args> rungs() { return kRungs; }

}  // namespace kf::KF_BACKEND::layer_norm_backward
