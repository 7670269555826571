// softmax v5_cluster: a row is shared by a cluster of blocks
//
// Idea      A row of 100 KB takes most of a multiprocessor's registers: while it is computed, nothing is left to load
//           the next one. So several multiprocessors share it. From compute capability 9.0 on, up to 16 blocks form a
//           cluster, and a thread can store into the shared memory of each of them. All that they have to tell each
//           other is two numbers a warp.
// Since v4  Up to 16 blocks a row instead of one. Values wait in shared memory instead of registers: asynchronous
//           copies bring them there, and a thread takes its own ones from there three times, so it waits for no other.
//           One exchange instead of two: a warp adds up against its own maximum, as the online softmax does, and
//           stores both into every block of the cluster.
// Launch    A row has V = ⌊width·sizeof(T)/16⌋ vectors. grid rows·c, block 256, clusters of c = 1, 2, 4, 8 or 16
//           blocks, the first with V ≤ 2048·c, or else 16. Shared memory: a block's share of the row, up to 32 KB where
//           c < 16 and up to 224 KB where not, and 2 values of each warp of the cluster
// Moves     2·rows·width·sizeof(T) bytes; about 5·rows·width FLOPs and 2·rows·width exponentials
// Limits    compute capability 9.0 or newer; V ≤ 229376: a row of 3.5 MB; rows·c ≤ 2³¹−1
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/vector.h>
#include <step2/cluster.h>
#include <step2/cp_async.h>
#include <step2/reduce.h>

#include "row.h"
#include "rungs.h"

namespace kf::KF_BACKEND::softmax {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarpSize;
constexpr int kMostBlocks = 16;                 // of a cluster
constexpr int64_t kVectorsOfBlock = 2048;       // 32 KB: several blocks find room on a multiprocessor
constexpr int64_t kMostVectorsOfBlock = 14336;  // 224 KB, where 16 blocks are not enough for that

template <class T>
__global__ void __launch_bounds__(kThreads)
    v5_cluster_kernel(const T* __restrict__ x, T* __restrict__ y, int width, int64_t q_length, compute_t<T> scale,
                      int blocks, bool alike) {
  constexpr int N = 16 / sizeof(T);
  using C = compute_t<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ C max_of_warp[kMostBlocks * kWarps], sum_of_warp[kMostBlocks * kWarps];  // of all blocks
  const int rank = static_cast<int>(cluster_rank_of_block());
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  cluster_barrier_arrive();  // nobody may store into a block that has not begun: waited for below

  const int64_t row = blockIdx.x / blocks;
  x += row * width;
  y += row * width;
  const Cut<T> cut(x, width);
  const int seen = static_cast<int>(columns_seen(row, width, q_length));
  const int seen_end = min(seen, cut.end);
  const int thread = rank * kThreads + static_cast<int>(threadIdx.x);  // of the cluster
  const int single = cut.single(thread);
  // Calls act(column, where its vector waits) for the vectors of this thread.
  const auto for_each_vector = [&](int end, auto&& act) {
    T* waits = reinterpret_cast<T*>(memory) + threadIdx.x * N;
    for (int c = cut.begin + thread * N; c < end; c += blocks * kThreads * N, waits += kThreads * N) act(c, waits);
  };

  for_each_vector(seen_end, [&](int c, T* waits) { cp_async_16(waits, x + c); });
  cp_async_commit();
  C alone = single < seen ? score_of(to_compute(x[single]), scale) : C(-INFINITY);
  cp_async_wait<0>();

  C max = alone;
  for_each_vector(seen_end, [&](int c, const T* waits) {
    C score[N];
    scores_of(load_vector<N>(waits), scale, c, seen, score);
#pragma unroll
    for (int j = 0; j < N; ++j) max = greater_of(max, score[j]);
  });
  max = warp_max(max);
  const C from = max == C(-INFINITY) ? C(0) : max;  // −∞ − (−∞) would be NaN, and other warps may have more

  C sum = weight_of(alone, from);
  for_each_vector(seen_end, [&](int c, const T* waits) {
    C score[N];
    scores_of(load_vector<N>(waits), scale, c, seen, score);
#pragma unroll
    for (int j = 0; j < N; ++j) sum += weight_of(score[j], from);  // 0 for what is hidden
  });
  sum = warp_sum(sum);

  cluster_barrier_wait();
  if (lane < blocks) {
    const int mine = rank * kWarps + warp;
    store_remote(remote_address(&max_of_warp[mine], lane), max);
    store_remote(remote_address(&sum_of_warp[mine], lane), sum);
  }
  if (blocks > 1) {
    cluster_sync();  // after it nobody reaches into another block, so each may end when it likes
  } else {
    __syncthreads();
  }

  C row_max = -INFINITY, row_sum = 0;  // every warp puts them together, all in the same order
  for (int i = lane; i < blocks * kWarps; i += kWarpSize) row_max = greater_of(row_max, max_of_warp[i]);
  row_max = warp_max(row_max);
  for (int i = lane; i < blocks * kWarps; i += kWarpSize) {
    row_sum += sum_of_warp[i] * weight_of(max_of_warp[i], row_max);
  }
  const C inverse = 1 / warp_sum(row_sum);

  for_each_vector(cut.end, [&](int c, const T* waits) {
    C weight[N] = {};
    if (c < seen) {
      scores_of(load_vector<N>(waits), scale, c, seen, weight);
#pragma unroll
      for (int j = 0; j < N; ++j) weight[j] = weight_of(weight[j], row_max) * inverse;
      hide(weight, c, seen, C(0));  // where the row has no maximum it is not 0 yet
    }
    if (alike) {
      store_values<true>(y + c, weight);
    } else {
      store_values<false>(y + c, weight);
    }
  });
  if (single < width) y[single] = from_compute<T>(single < seen ? weight_of(alone, row_max) * inverse : C(0));
}

int64_t blocks_of(const Args& a) {
  int64_t blocks = 1;
  while (blocks < kMostBlocks && vectors_of(a) > blocks * kVectorsOfBlock) blocks *= 2;
  return blocks;
}

}  // namespace

std::string v5_cluster_can_implement(const Args& a) {
  if (compute_capability() < 90) return "needs a GPU of compute capability 9.0 or newer";
  if (vectors_of(a) > kMostBlocks * kMostVectorsOfBlock) {
    return "takes rows of at most 229376 vectors of 16 bytes, got width " + std::to_string(a.width);
  }
  return can_implement_blocks(a.rows, blocks_of(a));
}

void v5_cluster(const Args& a, void* stream) {
  const int64_t blocks = blocks_of(a);
  const int64_t shared = 16 * kThreads * ceil_div(vectors_of(a), blocks * kThreads);
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    launch_in_clusters(v5_cluster_kernel<T>, blocks, dim3(static_cast<unsigned>(a.rows * blocks)), kThreads, shared,
                       stream, static_cast<const T*>(a.x), static_cast<T*>(a.y), static_cast<int>(a.width), mask_of(a),
                       static_cast<compute_t<T>>(a.scale), static_cast<int>(blocks), alike(a.x, a.y));
  });
}

}  // namespace kf::KF_BACKEND::softmax
