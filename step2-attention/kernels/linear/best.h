// The product that rungs of other ops take where they do not bring their own: what linear's `auto` takes.
#pragma once

#include <kf/best.h>

#include "rungs.h"

namespace kf::KF_BACKEND::linear {

// The product inside of another op as linear's arguments: of `x`, into `y`.
template <class Others>
Args args_of(const Others& a, const void* x, void* y) {
  return {x, a.weight, a.bias, y, a.rows, a.depth, a.width, false, a.weight_transposed, a.tf32, a.dtype};
}

inline const Rung<Args>& best(const Args& a) { return best_rung(rungs(), kf::linear::automatic(a), a); }
inline int64_t best_scratch_bytes(const Args& a) { return scratch_bytes_of(best(a), a); }
inline std::string can_implement(const Args& a) { return can_implement_any(rungs(), a); }

inline void launch_best(Args a, void* scratch, void* stream) {
  a.scratch = scratch;
  best(a).launch(a, stream);
}

}  // namespace kf::KF_BACKEND::linear
