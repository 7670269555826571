#include "rungs.h"

#include <cstdint>

namespace kf::KF_BACKEND::bias_gelu {
namespace {

std::string anything(const Args&) { return ""; }

// Where multiplication stands for division by the width.
std::string up_to_2_63(const Args& a) {
  return a.rows * a.width <= INT64_MAX / a.width ? "" : "takes rows·width² < 2⁶³";
}

constexpr Rung<Args> kRungs[] = {
    {"v1_unfused", v1_unfused, anything},       {"v2_naive", v2_naive, anything},
    {"v3_vector", v3_vector, anything},         {"v4_exp", v4_exp, anything},
    {"v5_any_width", v5_any_width, up_to_2_63},
};

}  // namespace

Rungs<Args> rungs() { return {kRungs, 5}; }

}  // namespace kf::KF_BACKEND::bias_gelu
