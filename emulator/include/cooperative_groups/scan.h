// Scans over a tile or the coalesced threads, in the order of the ranks.
#pragma once

#include "reduce.h"

namespace kf::simt {
namespace cooperative_groups {

template <class T, class Op>
T inclusive_scan(const warp_group& group, T value, Op op, CallSite site = CallSite::here()) {
  return combine<UpToMine>("cooperative_groups::inclusive_scan", group, value, op, site);
}
template <class T>
T inclusive_scan(const warp_group& group, T value, CallSite site = CallSite::here()) {
  return inclusive_scan(group, value, plus<T>(), site);
}

// The thread of rank 0 gets T().
template <class T, class Op>
T exclusive_scan(const warp_group& group, T value, Op op, CallSite site = CallSite::here()) {
  const T scanned = combine<UpToMine>("cooperative_groups::exclusive_scan", group, value, op, site);
  const T before = group.shfl_up(scanned, 1, site);
  return group.thread_rank() == 0 ? T() : before;
}
template <class T>
T exclusive_scan(const warp_group& group, T value, CallSite site = CallSite::here()) {
  return exclusive_scan(group, value, plus<T>(), site);
}

}  // namespace cooperative_groups
}  // namespace kf::simt
