// Reductions over a tile or the coalesced threads, in the order of the ranks.
#pragma once

#include "operators.h"

namespace kf::simt {
namespace cooperative_groups {

template <class T, class Op>
T reduce(const warp_group& group, T value, Op op, CallSite site = CallSite::here()) {
  return combine<Everything>("cooperative_groups::reduce", group, value, op, site);
}

}  // namespace cooperative_groups
}  // namespace kf::simt
