// softmax v6_cluster_registers: a cluster shares a row, and registers keep it
//
// Idea      v5 takes each value from shared memory three times and computes each exponential twice: more instructions
//           than a row of 128 KB leaves time for. A thread's eight vectors fit into registers, as in v4. Its weights
//           against its warp's maximum, computed for the sum, need only a factor to become the result: the warp's
//           weight against the row's maximum, divided by the row's sum.
// Since v5  Values stay in registers: one exponential a value instead of two, and shared memory only for the exchange.
//           A block takes neighbours, not every c-th piece. And nobody waits for the whole cluster: a warp's two
//           numbers are stored into each block asynchronously, an mbarrier there counts them, and with all of them it
//           goes on. Registers hold half of what shared memory held, so that waiting hurts more.
// Launch    A row has V = ⌊width·sizeof(T)/16⌋ vectors. grid rows·c, block 256, clusters of c = 1, 2, 4, 8 or 16
//           blocks, the first with V ≤ 2048·c: up to 8 vectors a thread. 2 values of shared memory for each warp of the
//           cluster
// Moves     2·rows·width·sizeof(T) bytes; about 5·rows·width FLOPs and rows·width exponentials
// Limits    compute capability 9.0 or newer; V ≤ 32768: a row of 512 KB; rows·c ≤ 2³¹−1. Half types: up to 60
//           bytes of a thread spill
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/vector.h>
#include <step2/cluster.h>
#include <step2/mbarrier.h>
#include <step2/reduce.h>

#include "row.h"
#include "rungs.h"

namespace kf::KF_BACKEND::softmax {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarpSize;
constexpr int kMostBlocks = 16;  // of a cluster
constexpr int kVectors = 8;      // of a thread
constexpr int64_t kVectorsOfBlock = kVectors * kThreads;
constexpr int kBlocksBeside = 3;  // for how many a multiprocessor shall have registers: some load, others compute

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocksBeside)
    v6_cluster_registers_kernel(const T* __restrict__ x, T* __restrict__ y, int width, int64_t q_length,
                                compute_t<T> scale, int blocks, bool alike) {
  constexpr int N = 16 / sizeof(T);
  using C = compute_t<T>;
  __shared__ C max_of_warp[kMostBlocks * kWarps], sum_of_warp[kMostBlocks * kWarps];  // of all blocks
  __shared__ uint64_t arrived;                                                        // counts what arrives there
  const int rank = static_cast<int>(cluster_rank_of_block());
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  if (threadIdx.x == 0) {
    mbarrier_init(&arrived, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(&arrived, blocks * kWarps * 2 * static_cast<int>(sizeof(C)));
  }
  cluster_barrier_arrive_relaxed();  // nobody may store into a block that has no mbarrier yet: waited for below

  const int64_t row = blockIdx.x / blocks;
  x += row * width;
  y += row * width;
  const Cut<T> cut(x, width);
  const int seen = static_cast<int>(columns_seen(row, width, q_length)), seen_end = min(seen, cut.end);
  const int single = cut.single(rank * kThreads + static_cast<int>(threadIdx.x));
  const auto first_of = [&](int i) {
    return cut.begin + ((rank * kVectors + i) * kThreads + static_cast<int>(threadIdx.x)) * N;
  };

  int4 bits[kVectors] = {};
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (first_of(i) < seen_end) bits[i] = *reinterpret_cast<const int4*>(x + first_of(i));
  }
  C alone = single < seen ? score_of(to_compute(x[single]), scale) : C(-INFINITY);

  C weight[kVectors][N];  // first the scores
  C max = alone;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    scores_of(load_vector<N>(reinterpret_cast<const T*>(&bits[i])), scale, first_of(i), seen_end, weight[i]);
#pragma unroll
    for (int j = 0; j < N; ++j) max = greater_of(max, weight[i][j]);
  }
  max = warp_max(max);
  const C from = max == C(-INFINITY) ? C(0) : max;  // −∞ − (−∞) would be NaN, and other warps may have more

  alone = weight_of(alone, from);
  C sum = alone;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) sum += weight[i][j] = weight_of(weight[i][j], from);  // 0 for what is hidden
  }
  sum = warp_sum(sum);

  cluster_barrier_wait();
  const int mine = rank * kWarps + warp;
  if (blocks == 1) {  // no cluster, and no asynchronous stores within one
    if (lane == 0) max_of_warp[mine] = max, sum_of_warp[mine] = sum;
    __syncthreads();
  } else {
    if (lane < blocks) {
      const uint32_t barrier = remote_address(&arrived, lane);
      store_remote_async(remote_address(&max_of_warp[mine], lane), max, barrier);
      store_remote_async(remote_address(&sum_of_warp[mine], lane), sum, barrier);
    }
    mbarrier_wait(&arrived, 0);  // then nobody reaches into this block any more, so it may end when it likes
  }

  C row_max = -INFINITY, row_sum = 0;  // every warp puts them together, all in the same order
  for (int i = lane; i < blocks * kWarps; i += kWarpSize) row_max = greater_of(row_max, max_of_warp[i]);
  row_max = warp_max(row_max);
  for (int i = lane; i < blocks * kWarps; i += kWarpSize) {
    row_sum += sum_of_warp[i] * weight_of(max_of_warp[i], row_max);
  }
  const C factor = weight_of(max, row_max) / warp_sum(row_sum);

#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int first = first_of(i);
    if (first >= cut.end) break;
#pragma unroll
    for (int j = 0; j < N; ++j) weight[i][j] *= factor;
    hide(weight[i], first, seen, C(0));  // where the row has no maximum they are not 0 yet
    if (alike) {
      store_values<true>(y + first, weight[i]);
    } else {
      store_values<false>(y + first, weight[i]);
    }
  }
  if (single < width) y[single] = from_compute<T>(single < seen ? alone * factor : C(0));
}

int64_t vectors_of(const Args& a) { return a.width * size_of(a.dtype) / 16; }

int64_t blocks_of(const Args& a) {
  int64_t blocks = 1;
  while (vectors_of(a) > blocks * kVectorsOfBlock) blocks *= 2;
  return blocks;
}

}  // namespace

std::string v6_cluster_registers_supports(const Args& a) {
  if (compute_capability() < 90) return "needs a GPU of compute capability 9.0 or newer";
  if (vectors_of(a) > kMostBlocks * kVectorsOfBlock) {
    return "takes rows of at most 32768 vectors of 16 bytes, got width " + std::to_string(a.width);
  }
  if (a.rows * blocks_of(a) > INT32_MAX) {
    return "takes at most 2147483647 blocks, got " + std::to_string(a.rows) + " rows of " +
           std::to_string(blocks_of(a));
  }
  return "";
}

void v6_cluster_registers(const Args& a, void* stream) {
  const int64_t blocks = blocks_of(a);
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    launch_in_clusters(v6_cluster_registers_kernel<T>, blocks, dim3(static_cast<unsigned>(a.rows * blocks)), kThreads,
                       0, stream, static_cast<const T*>(a.x), static_cast<T*>(a.y), static_cast<int>(a.width),
                       mask_of(a), static_cast<compute_t<T>>(a.scale), static_cast<int>(blocks), alike(a.x, a.y));
  });
}

}  // namespace kf::KF_BACKEND::softmax
