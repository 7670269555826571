#include "rungs.h"

namespace kf::KF_BACKEND::attention_decode {
namespace {

constexpr Rung<Args> kRungs[] = {
    {"v1_head", v1_head, v1_head_can_implement},
    {"v2_split", v2_split, v2_split_can_implement, v2_split_scratch},
    {"v3_mma", v3_mma, v3_mma_can_implement, v3_mma_scratch, "the weights"},
    {"v4_pipeline", v4_pipeline, v4_pipeline_can_implement, v4_pipeline_scratch, "the weights"},
    {"v5_cluster", v5_cluster, v5_cluster_can_implement, nullptr, "the weights"},
    {"v6_paged", v6_paged, v6_paged_can_implement, nullptr, "the weights"},
};

}  // namespace

Rungs<Args> rungs() { return kRungs; }

}  // namespace kf::KF_BACKEND::attention_decode
