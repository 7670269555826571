// linear's arguments as the products on tensor cores take them.
#pragma once

#include <step2/product.h>

#include <string>
#include <type_traits>

#include "rungs.h"

namespace kf::KF_BACKEND::linear {

inline Major major_of_x(const Args& a) { return a.x_transposed ? Major::kMN : Major::kK; }

// Why this cannot be done, or "". `can_implement_product`: mma's or hopper's. With both transposed it would be a fourth
// kernel that nobody asks for: neither forward nor backward pass has that.
template <class F>
std::string can_implement_majors(F can_implement_product, const Args& a) {
  if (a.x_transposed && a.weight_transposed) return "takes x or weight transposed, not both";
  return can_implement_product(product_of(a), major_of_x(a), major_of_weight(a), a.dtype);
}

// Calls f(x, weight) with their Majors as constants.
template <class F>
void with_majors(const Args& a, F&& f) {
  using K = std::integral_constant<Major, Major::kK>;
  using MN = std::integral_constant<Major, Major::kMN>;
  if (a.x_transposed) return f(MN{}, MN{});
  if (a.weight_transposed) return f(K{}, K{});
  f(K{}, MN{});
}

}  // namespace kf::KF_BACKEND::linear
