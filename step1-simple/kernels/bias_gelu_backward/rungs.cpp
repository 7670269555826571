#include "rungs.h"

#include <step1/column_grid.h>

namespace kf::KF_BACKEND::bias_gelu_backward {
namespace {

std::string anything(const Args&) { return ""; }

int64_t partial_sums(const Args& a) { return partial_sum_bytes(a.rows, a.width, a.dtype == DType::kFloat64); }

constexpr Rung<Args> kRungs[] = {
    {"v1_separate", v1_separate, anything, partial_sums, "grad_x before it is summed"},
    {"v2_fused", v2_fused, anything, partial_sums},
};

}  // namespace

Rungs<Args> rungs() { return kRungs; }

}  // namespace kf::KF_BACKEND::bias_gelu_backward
