// softmax v6_cluster_registers: a cluster shares a row, and registers keep it
//
// Idea      v5 takes each value from shared memory three times and computes each exponential twice. A thread's vectors
//           fit into registers, as in v4. Its weights against its warp's maximum, computed for the sum, need only a
//           factor to become the result: the warp's weight against the row's maximum, divided by the row's sum.
// Since v5  Values stay in registers. A block takes neighbours, not every c-th piece, and where its row sees all of
//           them no comparison stands between its vectors. Nobody waits for the whole cluster: a warp's two numbers are
//           stored into each block asynchronously, an mbarrier there counts them, and with all of them it goes on.
// Launch    A row has V = ⌊width·sizeof(T)/16⌋ vectors. grid rows·c, block 256, clusters of c blocks, two or more:
//           c = ⌈V/1536⌉ with 5 or 6 vectors a thread and 4 blocks beside each other, if that is at most 8 and has more
//           rows in flight, or ⌈V/2048⌉ with up to 8 and 3. 2 values of shared memory for each warp of the cluster
// Roles     all warps of the cluster are alike; lane r of each sends to block r
// Barriers  arrived: 1 arrival and the bytes of 8·c pairs, one from each warp of the cluster. The cluster's, once: all
//           have their `arrived`
// Moves     2·rows·width·sizeof(T) bytes; about 5·rows·width FLOPs and rows·width exponentials
// Limits    compute capability 9.0 or newer; V ≤ 32768: a row of 512 KB; rows·c ≤ 2³¹−1. With 6 or 8 vectors of
//           half types up to 80 bytes of a thread spill. Of narrow rows most threads have nothing
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/vector.h>
#include <step2/cluster.h>
#include <step2/mbarrier.h>
#include <step2/reduce.h>

#include <algorithm>

#include "row.h"
#include "rungs.h"

namespace kf::KF_BACKEND::softmax {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarpSize;
constexpr int kMostBlocks = 16;  // of a cluster

// For how many blocks beside each other a multiprocessor shall have registers: some load while others compute.
constexpr int blocks_beside(int vectors) { return vectors <= 6 ? 4 : 3; }

template <int kVectors, class T>
__global__ void __launch_bounds__(kThreads, blocks_beside(kVectors))
    v6_cluster_registers_kernel(const T* __restrict__ x, T* __restrict__ y, int width, int64_t q_length,
                                compute_t<T> scale, int blocks, bool alike) {
  constexpr int N = 16 / sizeof(T);
  using C = compute_t<T>;
  __shared__ Pair<C> max_and_sum[kMostBlocks * kWarps];  // of all warps of the cluster
  __shared__ uint64_t arrived;                           // counts what arrives there
  const int rank = static_cast<int>(cluster_rank_of_block());
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  if (threadIdx.x == 0) {
    mbarrier_init(&arrived, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_tx(&arrived, blocks * kWarps * static_cast<int>(sizeof(Pair<C>)));
  }
  cluster_barrier_arrive_relaxed();  // nobody may store into a block that has no mbarrier yet: waited for below

  const int64_t row = blockIdx.x / blocks;
  x += row * width, y += row * width;
  const Cut<T> cut(x, width);
  const int seen = static_cast<int>(columns_seen(row, width, q_length)), seen_end = min(seen, cut.end);
  const int single = cut.single(rank * kThreads + static_cast<int>(threadIdx.x));
  const int begin = cut.begin + rank * kVectors * kThreads * N;  // of this block
  const auto first_of = [&](int i) { return begin + (i * kThreads + static_cast<int>(threadIdx.x)) * N; };

  const auto take = [&](auto whole) {  // true_type: the row sees all that the block takes, and y lies as x does
    constexpr bool kWhole = decltype(whole)::value;
    int4 bits[kVectors] = {};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (kWhole || first_of(i) < seen_end) bits[i] = *reinterpret_cast<const int4*>(x + first_of(i));
    }
    C alone = single < seen ? score_of(to_compute(x[single]), scale) : C(-INFINITY);

    C weight[kVectors][N];  // first the scores
    C max = alone;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      scores_of(load_vector<N>(reinterpret_cast<const T*>(&bits[i])), scale, kWhole ? 0 : first_of(i),
                kWhole ? N : seen_end, weight[i]);
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
    if (lane < blocks) {
      const auto* const mine = &max_and_sum[rank * kWarps + warp];
      store_remote_async(remote_address(mine, lane), Pair<C>{max, sum}, remote_address(&arrived, lane));
    }
    mbarrier_wait_cluster(&arrived, 0);  // as for copies of TMA. Then nobody reaches into this block: it may end

    C row_max = -INFINITY, row_sum = 0;  // every warp puts them together, all in the same order
#pragma unroll 1                         // the weights need the registers
    for (int i = lane; i < blocks * kWarps; i += kWarpSize) row_max = greater_of(row_max, max_and_sum[i].first);
    row_max = warp_max(row_max);
#pragma unroll 1
    for (int i = lane; i < blocks * kWarps; i += kWarpSize) {
      row_sum += max_and_sum[i].second * weight_of(max_and_sum[i].first, row_max);
    }
    const C factor = weight_of(max, row_max) / warp_sum(row_sum);

#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (!kWhole && first_of(i) >= cut.end) break;
#pragma unroll
      for (int j = 0; j < N; ++j) weight[i][j] *= factor;
      if (!kWhole) hide(weight[i], first_of(i), seen, C(0));  // where the row has no maximum they are not 0 yet
      if (kWhole || alike) {
        store_values<true>(y + first_of(i), weight[i]);
      } else {
        store_values<false>(y + first_of(i), weight[i]);
      }
    }
    if (single < width) y[single] = from_compute<T>(single < seen ? alone * factor : C(0));
  };
  if (alike && begin + kVectors * kThreads * N <= seen_end) return take(std::true_type{});
  take(std::false_type{});
}

// Of a cluster, two or more. A multiprocessor has room for b/c rows, if for b blocks beside each other. More than 8
// blocks find each other on fewer multiprocessors.
int64_t blocks_of(const Args& a) {
  const int64_t of_six = std::max<int64_t>(ceil_div(vectors_of(a), 6 * kThreads), 2);
  const int64_t of_eight = std::max<int64_t>(ceil_div(vectors_of(a), 8 * kThreads), 2);
  return of_six <= 8 && blocks_beside(6) * of_eight > blocks_beside(8) * of_six ? of_six : of_eight;
}

template <int kVectors, class T>
void launch(const Args& a, void* stream) {
  const int64_t blocks = blocks_of(a);
  launch_in_clusters(v6_cluster_registers_kernel<kVectors, T>, blocks, dim3(static_cast<unsigned>(a.rows * blocks)),
                     kThreads, 0, stream, static_cast<const T*>(a.x), static_cast<T*>(a.y), static_cast<int>(a.width),
                     mask_of(a), static_cast<compute_t<T>>(a.scale), static_cast<int>(blocks), alike(a.x, a.y));
}

}  // namespace

std::string v6_cluster_registers_can_implement(const Args& a) {
  if (compute_capability() < 90) return "needs a GPU of compute capability 9.0 or newer";
  if (vectors_of(a) > kMostBlocks * 8 * kThreads) {
    return "takes rows of at most 32768 vectors of 16 bytes, got width " + std::to_string(a.width);
  }
  return can_implement_blocks(a.rows, blocks_of(a));
}

void v6_cluster_registers(const Args& a, void* stream) {
  const int64_t vectors = ceil_div(vectors_of(a), blocks_of(a) * kThreads);
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    constexpr void (*kOfVectors[])(const Args&, void*) = {launch<5, T>, launch<6, T>, launch<7, T>, launch<8, T>};
    kOfVectors[std::max<int64_t>(vectors - 5, 0)](a, stream);
  });
}

}  // namespace kf::KF_BACKEND::softmax
