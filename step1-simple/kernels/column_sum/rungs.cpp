#include "rungs.h"

#include <step1/column_grid.h>

namespace kf::KF_BACKEND::column_sum {
namespace {

std::string anything(const Args&) { return ""; }

int64_t partial_sums(const Args& a) { return partial_sum_bytes(a.rows, a.width, a.dtype == DType::kFloat64); }

constexpr Rung<Args> kRungs[] = {
    {"v1_serial", v1_serial, anything},
    {"v2_two_stage", v2_two_stage, anything, partial_sums},
    {"v3_vector", v3_vector, anything, partial_sums},
};

}  // namespace

Rungs<Args> rungs() { return kRungs; }

}  // namespace kf::KF_BACKEND::column_sum
