// linear_gelu's product as the rungs hand it on.
#pragma once

#include <step3/epilogues.h>

#include <type_traits>

#include "rungs.h"

namespace kf::KF_BACKEND::linear_gelu {

// Calls f(weight, epilogue) with the weight's Major as a constant.
template <class T, bool kCoarse, class F>
void with_epilogue(const Args& a, F&& f) {
  const Rows<T> y(a.y, a.rows, a.width), h(a.preactivation, a.rows, a.width);
  with_major_of_weight(a.weight_transposed, [&](auto weight) {
    const auto with_gelu = [&](auto tanh) {
      constexpr bool kTanh = decltype(tanh)::value;
      a.preactivation == nullptr ? f(weight, GeluEpilogue<T, kTanh, kCoarse, false>(y, h))
                                 : f(weight, GeluEpilogue<T, kTanh, kCoarse, true>(y, h));
    };
    a.tanh ? with_gelu(std::true_type{}) : with_gelu(std::false_type{});
  });
}

}  // namespace kf::KF_BACKEND::linear_gelu
