#include "rungs.h"

namespace kf::KF_BACKEND::linear_bias_dropout_residual {
namespace {

constexpr Rung<Args> kRungs[] = {
    {"v1_separate", v1_separate, v1_separate_can_implement, v1_separate_scratch_bytes, "the product"},
    {"v2_mma", v2_mma, v2_mma_can_implement, nullptr, "the product"},
    {"v3_hopper", v3_hopper, v3_hopper_can_implement, nullptr, "the product"},
    {"v4_cublaslt", v4_cublaslt, v4_cublaslt_can_implement, v4_cublaslt_scratch_bytes, "sums of parts, at some sizes"},
    {"v5_in_place", v5_in_place, v5_in_place_can_implement, nullptr, "the product"},
};

}  // namespace

Rungs<Args> rungs() { return kRungs; }

}  // namespace kf::KF_BACKEND::linear_bias_dropout_residual
