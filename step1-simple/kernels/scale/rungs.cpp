#include "rungs.h"

namespace kf::KF_BACKEND::scale {
namespace {

std::string anything(const Args&) { return ""; }

constexpr Rung<Args> kRungs[] = {
    {"v1_chunk", v1_chunk, anything},
    {"v2_naive", v2_naive, anything},
    {"v3_grid_stride", v3_grid_stride, anything},
    {"v4_vector", v4_vector, anything},
    {"v5_in_flight", v5_in_flight, anything},
    {"v6_streaming", v6_streaming, anything},
};

}  // namespace

Rungs<Args> rungs() { return kRungs; }

}  // namespace kf::KF_BACKEND::scale
