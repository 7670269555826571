// Reductions over a tile or the coalesced threads.
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

template <class Group, class T, class Op>
T reduce(const Group& group, T value, Op op, Site site = Site::here()) {
  T total = group.shfl(value, 0, site);
  for (unsigned rank = 1; rank < group.size(); ++rank) total = op(total, group.shfl(value, rank, site));
  return total;
}

}  // namespace cooperative_groups
}  // namespace kf::simt
