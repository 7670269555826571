// sample v1_naive: a block a row, and a threshold found bit by bit
//
// Idea      To take the k likeliest, nothing need be sorted: what is needed is the score of the last one. Scores become
//           integers of the same order (row.h). The greatest integer at or above which at least k of the row lie is
//           found from its highest bit down: 32 times the row is read and counted. The same with weights added up
//           instead of ones finds where top_p ends. The draw is a number below the sum of the kept weights; tile by
//           tile the block adds them up until it is passed. Weights are integers: any order of additions gives the same
//           sum.
// Launch    grid batch, block 256, 2.3 KB shared memory
// Moves     batch·width·(sizeof(T) + 1 where there is a penalty) bytes for each pass that no cache helps: 3 passes
//           greedy; 3 and a draw; 32 more for top_k, 33 for top_p
// Limits    batch ≤ 2³¹−1
#include <kf/launch.h>
#include <step2/reduce.h>

#include "row.h"
#include "rungs.h"

namespace kf::KF_BACKEND::sample {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void v1_naive_kernel(const Args a, const Rule<compute_t<T>> rule) {
  using C = compute_t<T>;
  __shared__ C shared[kWarpSize];
  __shared__ uint64_t shared_sums[kWarpSize], tile[kThreads];
  const Row<T> row(a, blockIdx.x);
  const auto sum_of = [&](auto value_of) {  // of all columns
    uint64_t sum = 0;
    for (int64_t c = threadIdx.x; c < a.width; c += kThreads) sum += value_of(c);
    return block_sum(sum, shared_sums);
  };

  C raw_max = -INFINITY, max = -INFINITY;
  bool bad = false;
  for (int64_t c = threadIdx.x; c < a.width; c += kThreads) {
    const C score = row.score(c);
    raw_max = greater_of(raw_max, row.raw(c));
    max = greater_of(max, score);
    bad = bad || isnan(score);
  }
  raw_max = block_max(raw_max, shared);
  max = block_max(max, shared);
  if (__syncthreads_or(bad || isinf(max))) {
    if (threadIdx.x == 0) finish<T>(a, blockIdx.x, rule.greedy, -1, raw_max, 0);
    return;
  }
  const uint64_t raw_sum = sum_of([&](int64_t c) { return weight_of(row.raw(c) - raw_max); });

  if (rule.greedy) {
    int64_t first = a.width;
    for (int64_t c = threadIdx.x; c < a.width && first == a.width; c += kThreads)
      first = row.score(c) == max ? c : first;
    const uint64_t before = block_max(static_cast<uint64_t>(a.width - first), shared_sums);
    if (threadIdx.x == 0) finish<T>(a, blockIdx.x, true, a.width - static_cast<int64_t>(before), raw_max, raw_sum);
    return;
  }

  // The greatest key at or above which the row's columns are worth at least `target`.
  const auto greatest_key = [&](uint64_t target, auto worth) {
    Key<C> greatest = 0;
    for (int bit = kBits<Key<C>> - 1; bit >= 0; --bit) {
      const Key<C> tried = greatest | Key<C>(1) << bit;
      if (sum_of([&](int64_t c) { return key_of(row.score(c)) >= tried ? worth(c) : 0; }) >= target) greatest = tried;
    }
    return greatest;
  };
  Key<C> least = 0;
  const auto kept = [&](int64_t c) {
    const C score = row.score(c);
    return key_of(score) >= least ? rule.weight(score, max) : 0;
  };
  if (rule.top_k > 0) least = greatest_key(rule.top_k, [](int64_t) { return uint64_t{1}; });
  if (rule.top_p < 1) least = greatest_key(rule.target(sum_of(kept)), kept);

  const auto drawn_from = [&](int64_t c) {
    const uint64_t weight = kept(c);
    return weight >= rule.least_weight ? weight : 0;
  };
  uint64_t rest = __umul64hi(random_bits(a.rng_state + 2 * blockIdx.x), sum_of(drawn_from));
  for (int64_t begin = 0; begin < a.width; begin += kThreads) {
    const int64_t c = begin + threadIdx.x;
    tile[threadIdx.x] = c < a.width ? drawn_from(c) : 0;
    const uint64_t sum = block_sum(tile[threadIdx.x], shared_sums);
    if (rest < sum) {
      if (threadIdx.x != 0) return;
      int passed = 0;
      for (; rest >= tile[passed]; ++passed) rest -= tile[passed];
      return finish<T>(a, blockIdx.x, false, begin + passed, raw_max, raw_sum);
    }
    rest -= sum;
  }
}

}  // namespace

void v1_naive(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    v1_naive_kernel<T><<<static_cast<unsigned>(a.batch), kThreads, 0, as_stream(stream)>>>(a, Rule<compute_t<T>>(a));
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::sample
