// sample v2_radix: the row in shared memory, and a threshold found eight bits at a time
//
// Idea      A histogram of the keys' highest eight bits says in which of 256 bins the threshold lies, and what all bins
//           above are worth. The next eight bits of that bin's keys say it more closely: four passes in place of 32,
//           two for bfloat16, whose keys have 16 bits and zeros. Weights are added up in the bins by atomics: in any
//           order, and yet the same sum.
// Since v1  The row is read once; its keys stay in shared memory, and a score comes back out of its key. A warp has
//           neighbouring columns, so that the sums of the warps say in which of them the drawn column lies.
// Launch    grid batch, block 1024, shared memory: a key for each column, of 4 bytes, 8 for float64; and 2.6 KB
// Moves     batch·width·(sizeof(T) + 1 where there is a penalty) bytes; twice that with a penalty
// Limits    batch ≤ 2³¹−1; keys must fit into shared memory: width ≤ 57,000 on Hopper, half of it for float64. Many
//           scores in few bins, as those of the first pass are, wait for each other's atomics; one multiprocessor does
//           all the work of a row
#include <kf/launch.h>
#include <step2/reduce.h>

#include <string>

#include "row.h"
#include "rungs.h"
#include "search.h"

namespace kf::KF_BACKEND::sample {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / kWarpSize;

template <class T>
__global__ void __launch_bounds__(kThreads) v2_radix_kernel(const Args a, const Rule<compute_t<T>> rule) {
  using C = compute_t<T>;
  using K = Key<C>;
  extern __shared__ __align__(16) unsigned char dynamic[];
  K* const keys = reinterpret_cast<K*>(dynamic);
  __shared__ C shared[kWarps];
  __shared__ uint64_t sums[kWarps], bins[kBins];
  __shared__ Found found;
  const Row<T> row(a, blockIdx.x);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int width = static_cast<int>(a.width);
  const int begin = warp * (static_cast<int>(ceil_div(width, kThreads)) * kWarpSize);  // of this warp's columns
  const int end = min(begin + static_cast<int>(ceil_div(width, kThreads)) * kWarpSize, width);
  const uint64_t random = rule.greedy ? 0 : random_bits(a.rng_state + 2 * blockIdx.x);

  C raw_max = -INFINITY, max = -INFINITY;
  bool bad = false;
  row.for_columns(begin, end, [&](int c, C raw, C score) {
    raw_max = greater_of(raw_max, raw);
    max = greater_of(max, score);
    bad = bad || isnan(score);
    keys[c] = key_of(score);  // for this thread, until the draw
  });
  raw_max = block_max(raw_max, shared);
  max = block_max(max, shared);
  if (__syncthreads_or(bad || isinf(max))) {
    if (threadIdx.x == 0) finish<T>(a, blockIdx.x, rule.greedy, -1, raw_max, 0);
    return;
  }
  uint64_t raw_sum = 0;
  for (int c = begin + lane; c < end; c += kWarpSize) {
    raw_sum += weight_of((row.seen == nullptr ? score_of(keys[c]) : row.raw(c)) - raw_max);
  }
  raw_sum = block_sum(raw_sum, sums);

  if (rule.greedy) {
    int first = width;
    for (int c = begin + lane; c < end && first == width; c += kWarpSize) first = keys[c] == key_of(max) ? c : first;
    const auto before = static_cast<int>(block_max(static_cast<uint64_t>(width - first), sums));
    if (threadIdx.x == 0) finish<T>(a, blockIdx.x, true, width - before, raw_max, raw_sum);
    return;
  }

  // The greatest key at or above which the row's columns are worth target_of(what all are worth).
  const auto greatest_key = [&](auto target_of, auto worth) {
    const int last = row.seen == nullptr ? kLowestBit<T> : 0;
    K greatest = 0;
    uint64_t above = 0, target = 0;
    for (int shift = kBits<K> - 8; shift >= last; shift -= 8) {
      const bool first = shift == kBits<K> - 8;
      if (threadIdx.x < kBins) bins[threadIdx.x] = 0;
      __syncthreads();
      for (int c = begin + lane; c < end; c += kWarpSize) {
        const K key = keys[c];
        if (!first && (key ^ greatest) >> (shift + 8) != 0) continue;
        const uint64_t value = worth(key);
        if (value != 0) atomicAdd(reinterpret_cast<unsigned long long*>(&bins[key >> shift & (kBins - 1)]), value);
      }
      __syncthreads();
      if (warp == 0) find_bin(bins, above, [&](uint64_t sum) { return first ? target_of(sum) : target; }, &found);
      __syncthreads();
      greatest |= static_cast<K>(found.bin) << shift;
      above = found.above, target = found.target;
    }
    return greatest;
  };
  K least = 0;
  const auto kept = [&](K key) { return key >= least ? rule.weight(score_of(key), max) : 0; };
  if (rule.top_k > 0) {
    least = greatest_key([&](uint64_t) { return rule.top_k; }, [](K) { return uint64_t{1}; });
  }
  if (rule.top_p < 1) least = greatest_key([&](uint64_t sum) { return rule.target(sum); }, kept);

  const auto drawn_from = [&](int64_t c) {
    const uint64_t weight = kept(keys[c]);
    return weight >= rule.least_weight ? weight : 0;
  };
  uint64_t own = 0;
  for (int c = begin + lane; c < end; c += kWarpSize) own += drawn_from(c);
  own = warp_sum(own);
  if (lane == 0) sums[warp] = own;
  __syncthreads();  // a warp now reads what others wrote, keys too
  const uint64_t through = warp_scan(sums[lane]);
  const uint64_t drawn = __umul64hi(random, __shfl_sync(kFullWarp, through, kWarpSize - 1));
  const uint64_t before = __shfl_sync(kFullWarp, through, warp) - own;
  if (drawn < before || drawn - before >= own) return;  // all warps but one
  const int64_t token = column_of(begin, end, drawn - before, drawn_from);
  if (lane == 0) finish<T>(a, blockIdx.x, false, token, raw_max, raw_sum);
}

int64_t shared_bytes(const Args& a) { return a.width * (a.dtype == DType::kFloat64 ? 8 : 4); }

}  // namespace

std::string v2_radix_can_implement(const Args& a) {
  return too_much_shared_memory(shared_bytes(a) + 3072, "a row's keys");
}

void v2_radix(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    allow_shared(v2_radix_kernel<T>, shared_bytes(a));
    v2_radix_kernel<T>
        <<<static_cast<unsigned>(a.batch), kThreads, shared_bytes(a), as_stream(stream)>>>(a, Rule<compute_t<T>>(a));
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::sample
