#include "rungs.h"

namespace kf::KF_BACKEND::attention_backward {
namespace {

std::string anything(const Args&) { return ""; }

constexpr Rung<Args> kRungs[] = {
    {"v1_naive", v1_naive, anything, v1_naive_scratch},
    {"v2_tiled", v2_tiled, v2_tiled_can_implement, delta_bytes},
    {"v3_mma", v3_mma, v3_mma_can_implement, delta_bytes, "the weights and their gradients"},
    {"v4_warpgroups", v4_warpgroups, v4_warpgroups_can_implement, v4_warpgroups_scratch,
     "the weights and their gradients"},
    {"v5_persistent", v5_persistent, v5_persistent_can_implement, v5_persistent_scratch,
     "the weights and their gradients"},
    {"v6_atomics", v6_atomics, v6_atomics_can_implement, v6_atomics_scratch, "the weights and their gradients", true},
    {"v7_turns", v7_turns, v7_turns_can_implement, v7_turns_scratch, "the weights and their gradients"},
    {"v8_wide", v8_wide, v8_wide_can_implement, v8_wide_scratch, "the weights and their gradients"},
};

}  // namespace

// Δ, one number a query.
int64_t delta_bytes(const Args& a) {
  return a.batch * a.heads * a.q_length * (a.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float));
}

// Δ, all weights and all gradients of scores.
int64_t v1_naive_scratch(const Args& a) { return delta_bytes(a) * (1 + 2 * a.k_length); }

Rungs<Args> rungs() { return kRungs; }

}  // namespace kf::KF_BACKEND::attention_backward
