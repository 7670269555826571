// softmax v2_block: a block a row
//
// Idea      Thread t takes columns t, t+256, t+512, …: neighbouring threads read neighbouring addresses. Each thread
//           then has a maximum and a sum of its own columns only, so the block reduces them: 32 lanes into one by
//           shuffles, the warps' results through shared memory (step2/reduce.h).
// Since v1  A row is spread over a block, reads are coalesced, and there are 256 times as many threads. The second and
//           third read of a row mostly find it in cache, since the block has just read it.
// Launch    grid rows, block min(256, width rounded up to 32), 32 values of shared memory
// Moves     2·rows·width·sizeof(T) bytes as long as a row stays in cache;
//           about 5·rows·width FLOPs and 2·rows·width exponentials
// Limits    rows ≤ 2³¹−1; narrow rows leave most of a multiprocessor's threads waiting at barriers
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step2/online_softmax.h>
#include <step2/reduce.h>

#include <algorithm>

#include "row.h"
#include "rungs.h"

namespace kf::KF_BACKEND::softmax {
namespace {

constexpr int64_t kThreads = 256;

template <class T>
__global__ void v2_block_kernel(const T* __restrict__ x, T* __restrict__ y, int64_t width, int64_t q_length,
                                compute_t<T> scale) {
  __shared__ compute_t<T> shared[kWarpSize];
  x += blockIdx.x * width;
  y += blockIdx.x * width;
  const int64_t seen = columns_seen(blockIdx.x, width, q_length);

  compute_t<T> max = -INFINITY;
  for (int64_t c = threadIdx.x; c < seen; c += blockDim.x) max = greater_of(max, score_of(to_compute(x[c]), scale));
  max = block_max(max, shared);

  compute_t<T> sum = 0;
  for (int64_t c = threadIdx.x; c < seen; c += blockDim.x) sum += exponential(score_of(to_compute(x[c]), scale) - max);
  sum = block_sum(sum, shared);

  for (int64_t c = threadIdx.x; c < width; c += blockDim.x) {
    y[c] = from_compute<T>(c < seen ? exponential(score_of(to_compute(x[c]), scale) - max) / sum : 0);
  }
}

}  // namespace

std::string v2_block_can_implement(const Args& a) { return can_implement_a_block_a_row(a.rows); }

void v2_block(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const auto threads = static_cast<unsigned>(std::min(kThreads, kWarpSize * ceil_div(a.width, kWarpSize)));
    v2_block_kernel<<<static_cast<unsigned>(a.rows), threads, 0, as_stream(stream)>>>(
        static_cast<const T*>(a.x), static_cast<T*>(a.y), a.width, mask_of(a), static_cast<compute_t<T>>(a.scale));
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::softmax
