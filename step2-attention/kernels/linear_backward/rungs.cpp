#include "rungs.h"

namespace kf::KF_BACKEND::linear_backward {
namespace {

constexpr Rung<Args> kRungs[] = {
    {"v1_vector", v1_vector, v1_vector_can_implement, v1_vector_scratch_bytes},
    {"v2_mma", v2_mma, v2_mma_can_implement, v2_mma_scratch_bytes},
    {"v3_hopper", v3_hopper, v3_hopper_can_implement, v3_hopper_scratch_bytes},
    {"v4_best", v4_best, v4_best_can_implement, v4_best_scratch_bytes, "sums of parts, at some sizes"},
};

}  // namespace

Rungs<Args> rungs() { return kRungs; }

}  // namespace kf::KF_BACKEND::linear_backward
