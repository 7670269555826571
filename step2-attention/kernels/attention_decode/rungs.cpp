#include "rungs.h"

namespace kf::KF_BACKEND::attention_decode {
namespace {

constexpr Rung<Args> kRungs[] = {
    {"v1_head", v1_head, v1_head_supports},
    {"v2_split", v2_split, v2_split_supports, v2_split_scratch},
    {"v3_mma", v3_mma, v3_mma_supports, v3_mma_scratch, "the weights"},
    {"v4_pipeline", v4_pipeline, v4_pipeline_supports, v4_pipeline_scratch, "the weights"},
    {"v5_cluster", v5_cluster, v5_cluster_supports, nullptr, "the weights"},
    {"v6_paged", v6_paged, v6_paged_supports, nullptr, "the weights"},
};

}  // namespace

Rungs<Args> rungs() { return kRungs; }

}  // namespace kf::KF_BACKEND::attention_decode
