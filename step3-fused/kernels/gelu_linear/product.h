// gelu_linear's product and its beginning as the rungs hand them on.
#pragma once

#include <step3/epilogues.h>
#include <step3/prologues.h>

#include "rungs.h"

namespace kf::KF_BACKEND::gelu_linear {

// Calls f(weight, prologue) with the weight's Major as a constant.
template <class T, class F>
void with_prologue(const Args& a, F&& f) {
  with_major_of_weight(a.weight_transposed, [&](auto weight) {
    a.tanh ? f(weight, GeluPrologue<T, true>{}) : f(weight, GeluPrologue<T, false>{});
  });
}

}  // namespace kf::KF_BACKEND::gelu_linear
