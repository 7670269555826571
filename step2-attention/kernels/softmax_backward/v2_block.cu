// softmax_backward v2_block: a block a row
//
// Idea      Thread t takes columns t, t+256, t+512, …, and has the sum of its own products only. One reduction, by
//           shuffles and shared memory (step2/reduce.h), gives every thread the row's. No maximum this time.
// Since v1  A row is spread over a block and reads are coalesced. The second read of grad and y mostly finds them in
//           cache, since the block has just read them.
// Launch    grid rows, block min(256, width rounded up to 32), 32 values of shared memory
// Moves     3·rows·width·sizeof(T) bytes as long as a row of both stays in cache; 5·rows·width FLOPs
// Limits    rows ≤ 2³¹−1; narrow rows leave most of a multiprocessor's threads waiting at barriers
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step2/reduce.h>

#include <algorithm>

#include "row.h"
#include "rungs.h"

namespace kf::KF_BACKEND::softmax_backward {
namespace {

constexpr int64_t kThreads = 256;

template <class T>
__global__ void v2_block_kernel(const T* __restrict__ grad, const T* __restrict__ y, T* __restrict__ grad_x,
                                int64_t width, int64_t q_length, compute_t<T> scale) {
  __shared__ compute_t<T> shared[kWarpSize];
  grad += blockIdx.x * width;
  y += blockIdx.x * width;
  grad_x += blockIdx.x * width;
  const int64_t seen = columns_seen(blockIdx.x, width, q_length);

  compute_t<T> sum = 0;
  for (int64_t c = threadIdx.x; c < seen; c += blockDim.x) sum += to_compute(y[c]) * to_compute(grad[c]);
  sum = block_sum(sum, shared);

  for (int64_t c = threadIdx.x; c < width; c += blockDim.x) {
    grad_x[c] = from_compute<T>(c < seen ? scale * (to_compute(y[c]) * (to_compute(grad[c]) - sum)) : 0);
  }
}

}  // namespace

std::string v2_block_can_implement(const Args& a) { return can_implement_a_block_a_row(a.rows); }

void v2_block(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const auto threads = static_cast<unsigned>(std::min(kThreads, kWarpSize * ceil_div(a.width, kWarpSize)));
    v2_block_kernel<<<static_cast<unsigned>(a.rows), threads, 0, as_stream(stream)>>>(
        static_cast<const T*>(a.grad), static_cast<const T*>(a.y), static_cast<T*>(a.grad_x), a.width, mask_of(a),
        static_cast<compute_t<T>>(a.scale));
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::softmax_backward
