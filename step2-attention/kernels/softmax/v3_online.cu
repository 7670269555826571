// softmax v3_online: maximum and sum in one pass
//
// Idea      A thread keeps the greatest value so far and the sum weighted against it; when a greater value comes, it
//           scales the sum down and goes on (step2/online_softmax.h). So a row is read twice instead of three times.
//           The same trick lets attention forget scores that it has used.
// Since v2  The first two passes have become one, and loads and stores are 16 bytes wide (step1/vector.h): N = 16 /
//           sizeof(T) neighbours a thread. Where N does not divide the width, or a pointer does not start at a multiple
//           of 16 bytes, N is 1.
// Launch    grid rows, block min(256, width/N rounded up to 32), 32 values of shared memory
// Moves     2·rows·width·sizeof(T) bytes as long as a row stays in cache;
//           about 5·rows·width FLOPs and 2·rows·width exponentials
// Limits    rows ≤ 2³¹−1; the second read of a row wider than the cache goes to memory. With N = 1 it is slower than v2
//           on an H200 (84 µs for 78 at 16384×1023, bfloat16): the running maximum costs more than the pass it saves
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/vector.h>
#include <step2/online_softmax.h>
#include <step2/reduce.h>

#include <algorithm>

#include "row.h"
#include "rungs.h"

namespace kf::KF_BACKEND::softmax {
namespace {

constexpr int64_t kThreads = 256;

template <int N, class T>
__global__ void v3_online_kernel(const T* __restrict__ x, T* __restrict__ y, int64_t width, int64_t q_length,
                                 compute_t<T> scale) {
  using C = compute_t<T>;
  __shared__ C shared[kWarpSize];
  x += blockIdx.x * width;
  y += blockIdx.x * width;

  const int64_t seen = columns_seen(blockIdx.x, width, q_length);

  OnlineSoftmax<C> own;  // of this thread's columns
  for (int64_t c = int64_t{threadIdx.x} * N; c < seen; c += int64_t{blockDim.x} * N) {
    C score[N];
    scores_of(load_vector<N>(x + c), scale, c, seen, score);
    C max = score[0];
#pragma unroll
    for (int j = 1; j < N; ++j) max = greater_of(max, score[j]);
    own.raise(max);  // once for N values
#pragma unroll
    for (int j = 0; j < N; ++j) own.sum += own.weight(score[j]);
  }

  OnlineSoftmax<C> row;
  row.max = block_max(own.max, shared);
  row.sum = block_sum(own.sum * row.weight(own.max), shared);

  for (int64_t c = int64_t{threadIdx.x} * N; c < width; c += int64_t{blockDim.x} * N) {
    C weight[N] = {};
    if (c < seen) {
      scores_of(load_vector<N>(x + c), scale, c, seen, weight);
#pragma unroll
      for (int j = 0; j < N; ++j) weight[j] = row.weight(weight[j]) / row.sum;
      hide(weight, c, seen, C(0));  // 0 / 0 is not
    }
    store_vector(y + c, narrow<T>(weight));
  }
}

template <int N, class T>
void launch(const Args& a, void* stream) {
  const auto threads = static_cast<unsigned>(std::min(kThreads, kWarpSize * ceil_div(a.width / N, kWarpSize)));
  v3_online_kernel<N><<<static_cast<unsigned>(a.rows), threads, 0, as_stream(stream)>>>(
      static_cast<const T*>(a.x), static_cast<T*>(a.y), a.width, mask_of(a), static_cast<compute_t<T>>(a.scale));
}

}  // namespace

std::string v3_online_can_implement(const Args& a) { return can_implement_a_block_a_row(a.rows); }

void v3_online(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    constexpr int kVector = 16 / sizeof(T);
    if (a.width % kVector == 0 && aligned_16(a.x, a.y)) {
      launch<kVector, T>(a, stream);
    } else {
      launch<1, T>(a, stream);
    }
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::softmax
