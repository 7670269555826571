// Why the rungs for few rows cannot take an MLP.
#pragma once

#include <step2/hopper_product.h>

#include "rungs.h"

namespace kf::KF_BACKEND::mlp {

// "" if they can. One tile has all rows.
inline std::string can_implement_few_rows(const Args& a, int64_t most_rows) {
  if (a.rows > most_rows) return "takes rows ≤ " + std::to_string(most_rows) + ", got " + std::to_string(a.rows);
  if (a.inner % 8 != 0) return "takes an inner width that is a multiple of 8, got " + std::to_string(a.inner);
  const Major major = a.weight_transposed ? Major::kK : Major::kMN;
  const std::string why_not =
      hopper::can_implement_product({a.x, a.weight_1, a.bias_1, a.rows, a.width, a.inner}, Major::kK, major, a.dtype);
  if (!why_not.empty()) return why_not;
  return aligned_16(a.weight_2) ? "" : "takes x and weights that begin at multiples of 16 bytes";
}

}  // namespace kf::KF_BACKEND::mlp
