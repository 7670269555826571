// A cluster's search for a threshold among its blocks' keys: by a histogram of distances, and among the few that are
// left.
#pragma once

#include <step2/cluster.h>
#include <step2/reduce.h>

#include <cstdint>
#include <cstring>

#include "row.h"
#include "search.h"

namespace kf::KF_BACKEND::sample {

constexpr int kFew = 256;                // so many candidates are gathered, one for each of the first threads
constexpr int kLowBits = 18;             // of a weight, in a bin's lower half
constexpr int64_t kMostColumns = 16384;  // of a block: a half of so many weights stays below 2³²

// What warps and blocks tell each other: multiples of 16 bytes.
template <class C>
struct alignas(16) Greatest {
  C raw_max, max;
  int column;  // the first of `max`
  int bad;     // whether there is a NaN
};
struct alignas(16) Sums {
  uint64_t raw, kept;
};
struct alignas(16) Bin {
  unsigned count, low, high, unused;  // worth low + 2¹⁸·high
};
struct alignas(16) Candidate {
  uint64_t key, worth;
};

// What the block of that rank has where `pointer` is here.
template <class S>
__device__ __forceinline__ S load_from(const S* pointer, int rank) {
  static_assert(sizeof(S) % 16 == 0);
  float4 parts[sizeof(S) / 16];
  const uint32_t address = remote_address(pointer, rank);
#pragma unroll
  for (size_t i = 0; i < sizeof(S) / 16; ++i) parts[i] = load_remote_4(address + 16 * static_cast<uint32_t>(i));
  S value;
  memcpy(&value, parts, sizeof value);
  return value;
}

// In the shared memory of each block.
template <class K>
struct ClusterSearch {
  Bin bins[2][kBins];  // of one histogram after the other: those of the one before may still be read
  Candidate candidates[kFew], gathered[kFew];
  uint64_t worths[kBins];
  unsigned counts[kBins], candidate_count;
  int histograms;  // so far
  Found found;
  K keys[kWarpSize];
};

// One histogram of all blocks' keys: bin_of(key), −1 for keys that do not count.
template <class K, class Columns, class BinOf, class Worth>
__device__ __forceinline__ void add_up(ClusterSearch<K>& shared, int blocks, Columns& for_own_columns, BinOf bin_of,
                                       Worth worth) {
  Bin* const own = shared.bins[shared.histograms % 2];
  if (threadIdx.x < kBins) own[threadIdx.x] = Bin{};
  __syncthreads();
  for_own_columns([&](int, K key) {
    const int bin = bin_of(key);
    if (bin < 0) return;
    const uint64_t value = worth(key);
    const unsigned low = static_cast<unsigned>(value) & ((1u << kLowBits) - 1);
    const auto high = static_cast<unsigned>(value >> kLowBits);
    atomicAdd(&own[bin].count, 1u);
    if (low != 0) atomicAdd(&own[bin].low, low);
    if (high != 0) atomicAdd(&own[bin].high, high);
  });
  cluster_sync();
  if (threadIdx.x == 0) ++shared.histograms;
  if (threadIdx.x >= kBins) return;
  unsigned count = 0;
  uint64_t value = 0;
  for (int rank = 0; rank < blocks; ++rank) {
    const Bin bin = load_from(&own[threadIdx.x], rank);
    count += bin.count, value += bin.low + (uint64_t{bin.high} << kLowBits);
  }
  shared.counts[threadIdx.x] = count, shared.worths[threadIdx.x] = value;
}

// Brings the cluster's candidates, `count` at most kFew, into each block; each thread then adds up what its own and all
// above are worth. The greatest key that reaches the target with what is above the candidates.
template <class K, class Columns, class Is, class Worth>
__device__ __forceinline__ K greatest_of_few(ClusterSearch<K>& shared, int blocks, unsigned count,
                                             Columns& for_own_columns, Is is_candidate, Worth worth) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  if (threadIdx.x == 0) shared.candidate_count = 0;
  __syncthreads();
  for_own_columns([&](int, K key) {
    if (is_candidate(key)) shared.candidates[atomicAdd(&shared.candidate_count, 1u)] = Candidate{key, worth(key)};
  });
  cluster_sync();
  // Warp w takes those of block w, and puts them behind those of the blocks before.
  const uint64_t own = lane < blocks ? __float_as_uint(load_remote(remote_address(&shared.candidate_count, lane))) : 0;
  const uint64_t through = warp_scan(own);
  const auto place = static_cast<int>(__shfl_sync(kFullWarp, through - own, warp));
  const auto of_block = static_cast<int>(__shfl_sync(kFullWarp, own, warp));
  for (int i = lane; i < of_block; i += kWarpSize) {
    shared.gathered[place + i] = load_from(&shared.candidates[i], warp);
  }
  __syncthreads();
  K key = 0;
  if (threadIdx.x < count) {
    key = static_cast<K>(shared.gathered[threadIdx.x].key);
    uint64_t reached = shared.found.above;
    for (unsigned i = 0; i < count; ++i) {
      const Candidate other = shared.gathered[i];
      reached += other.key >= key ? other.worth : 0;
    }
    if (reached < shared.found.target) key = 0;
  }
  return block_max(key, shared.keys);
}

// The greatest key at or above which the row's columns, those of keys below `from` left out, are worth target_of(what
// all are worth). Below bit `last` keys are alike.
template <int kThreads, class K, class C, class TargetOf, class Worth, class Columns>
__device__ K cluster_search(ClusterSearch<K>& shared, int blocks, int last, C max, K from, TargetOf target_of,
                            Worth worth, Columns& for_own_columns) {
  static_assert(kThreads >= kBins && kThreads >= kFew);
  const auto distance_bin = [&](K key) {
    return kBins - 1 - static_cast<int>(fmin(product(max - score_of(key), C(8)), C(kBins - 1)));
  };
  int nearest = 0;  // the bin of distances in which the threshold lies
  K prefix = 0;     // its bits from `shift` on
  for (int shift = kBits<K>; shift >= last; shift -= 8) {
    const bool first = shift == kBits<K>;
    const auto bin_of = [&](K key) {
      if (key < from) return -1;
      const int distance = distance_bin(key);
      if (first) return distance;
      const bool above = shift + 8 < kBits<K> && (key ^ prefix) >> (shift + 8) != 0;
      return distance != nearest || above ? -1 : static_cast<int>(key >> shift & (kBins - 1));
    };
    add_up(shared, blocks, for_own_columns, bin_of, worth);
    const uint64_t above = first ? 0 : shared.found.above, target = first ? 0 : shared.found.target;
    __syncthreads();
    if (threadIdx.x < kWarpSize) {
      find_bin(shared.worths, above, [&](uint64_t sum) { return first ? target_of(sum) : target; }, &shared.found);
    }
    __syncthreads();
    const int bin = shared.found.bin;
    const unsigned count = shared.counts[bin];
    if (count <= kFew) {
      return greatest_of_few(shared, blocks, count, for_own_columns, [&](K key) { return bin_of(key) == bin; }, worth);
    }
    if (first) {
      nearest = bin;
    } else {
      prefix |= static_cast<K>(bin) << shift;
    }
  }
  return prefix;  // all that are left are alike
}

}  // namespace kf::KF_BACKEND::sample
