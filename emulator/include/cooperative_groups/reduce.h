// Reductions over a tile or the coalesced threads, in the order of the ranks; and what scans have in common with them.
#pragma once

#include "../cooperative_groups.h"

namespace kf::simt {
namespace cooperative_groups {

template <class T>
struct plus {
  T operator()(T a, T b) const { return a + b; }
};
template <class T>
struct less {
  T operator()(T a, T b) const { return b < a ? b : a; }
};
template <class T>
struct greater {
  T operator()(T a, T b) const { return a < b ? b : a; }
};
template <class T>
struct bit_and {
  T operator()(T a, T b) const { return a & b; }
};
template <class T>
struct bit_or {
  T operator()(T a, T b) const { return a | b; }
};
template <class T>
struct bit_xor {
  T operator()(T a, T b) const { return a ^ b; }
};

// The values of all lanes meet in one place; there Work combines them in the order of the ranks.
template <class T, class Op>
struct CombineLane {
  T value;
  Op* op;
};
struct Everything {  // each lane gets the total
  template <class Lane>
  void operator()(Lane* const* lanes, unsigned present) const {
    const int first = __ffs(static_cast<int>(present)) - 1;
    auto total = lanes[first]->value;
    for (int i = first + 1; i < warpSize; ++i) {
      if (present >> i & 1) total = (*lanes[first]->op)(total, lanes[i]->value);
    }
    for (int i = first; i < warpSize; ++i) {
      if (present >> i & 1) lanes[i]->value = total;
    }
  }
};
struct UpToMine {  // each lane gets the total of the lanes up to itself
  template <class Lane>
  void operator()(Lane* const* lanes, unsigned present) const {
    const int first = __ffs(static_cast<int>(present)) - 1;
    auto total = lanes[first]->value;
    for (int i = first + 1; i < warpSize; ++i) {
      if (present >> i & 1) lanes[i]->value = total = (*lanes[first]->op)(total, lanes[i]->value);
    }
  }
};
template <class Work, class T, class Op>
T combine(const char* name, const warp_group& group, T value, Op& op, CallSite site) {
  CombineLane<T, Op> lane{value, &op};
  warp_collective<Work>(name, lane, lanes_of(group), site, WarpKind::kReduce);
  return lane.value;
}

template <class T, class Op>
T reduce(const warp_group& group, T value, Op op, CallSite site = CallSite::here()) {
  return combine<Everything>("cooperative_groups::reduce", group, value, op, site);
}

}  // namespace cooperative_groups
}  // namespace kf::simt
