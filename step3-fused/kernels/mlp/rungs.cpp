#include "rungs.h"

namespace kf::KF_BACKEND::mlp {
namespace {

constexpr Rung<Args> kRungs[] = {
    {"v1_separate", v1_separate, v1_separate_can_implement, v1_separate_scratch_bytes, "what lies between"},
    {"v2_mma", v2_mma, v2_mma_can_implement, v2_mma_scratch_bytes, "what lies between"},
    {"v3_hopper", v3_hopper, v3_hopper_can_implement, v3_hopper_scratch_bytes, "what lies between"},
    {"v4_best", v4_best, v4_best_can_implement, v4_best_scratch_bytes, "what lies between"},
    {"v5_rows", v5_rows, v5_rows_can_implement, v5_rows_scratch_bytes, "what lies between"},
    {"v6_one_launch", v6_one_launch, v6_one_launch_can_implement, v6_one_launch_scratch_bytes, "what lies between"},
    {"v7_inner", v7_inner, v7_inner_can_implement, v7_inner_scratch_bytes, "what lies between"},
};

}  // namespace

Rungs<Args> rungs() { return kRungs; }

}  // namespace kf::KF_BACKEND::mlp
