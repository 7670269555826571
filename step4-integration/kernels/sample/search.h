// What v2 and v3 search with: a histogram for a threshold, and a warp's columns for the one that was drawn.
#pragma once

#include <step2/reduce.h>

#include <cstdint>

namespace kf::KF_BACKEND::sample {

constexpr int kBins = 256;  // of a histogram

// The sum of the values of this lane and those before it.
__device__ __forceinline__ uint64_t warp_scan(uint64_t value) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int away = 1; away < kWarpSize; away *= 2) {
    const uint64_t before = __shfl_up_sync(kFullWarp, value, away);
    if (lane >= away) value += before;
  }
  return value;
}

// Which bin the threshold lies in, what all bins above are worth, and what they must reach with it.
struct Found {
  int bin;
  uint64_t above;
  uint64_t target;
};

// A warp's: from the highest bin down, the first one with which `above` and the bins reach target_of(their sum).
template <class TargetOf>
__device__ __forceinline__ void find_bin(const uint64_t* worth, uint64_t above, TargetOf target_of, Found* found) {
  constexpr int kOfLane = kBins / kWarpSize;
  const int highest = kBins - 1 - static_cast<int>(threadIdx.x) % kWarpSize * kOfLane;
  uint64_t own = 0;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) own += worth[highest - i];
  const uint64_t through = warp_scan(own);
  const uint64_t target = target_of(__shfl_sync(kFullWarp, through, kWarpSize - 1));
  above += through - own;
  if (above >= target || above + own < target) return;  // all lanes but one
  int bin = highest;
  for (; above + worth[bin] < target; --bin) above += worth[bin];
  *found = {bin, above, target};
}

// A warp's: the first of columns begin to end − 1 that with those before it weighs more than `rest`.
template <class WeightOf>
__device__ __forceinline__ int64_t column_of(int64_t begin, int64_t end, uint64_t rest, WeightOf weight_of) {
  const int lane = threadIdx.x % kWarpSize;
  for (;; begin += kWarpSize) {
    const uint64_t through = warp_scan(begin + lane < end ? weight_of(begin + lane) : 0);
    const unsigned passed = __ballot_sync(kFullWarp, through > rest);
    if (passed != 0) return begin + __ffs(static_cast<int>(passed)) - 1;
    rest -= __shfl_sync(kFullWarp, through, kWarpSize - 1);
  }
}

}  // namespace kf::KF_BACKEND::sample
