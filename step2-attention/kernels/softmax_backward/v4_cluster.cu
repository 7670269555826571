// softmax_backward v4_cluster: a row is shared by a cluster of blocks
//
// Idea      A row of 100 KB is 200 KB here, of grad and of y. As in softmax's v5, up to 16 multiprocessors share it;
//           from compute capability 9.0 on. All that their blocks have to tell each other is one number a warp: its
//           part of the sum. There is no maximum to agree upon first.
// Since v3  Up to 16 blocks a row instead of one. Values wait in shared memory instead of registers: asynchronous
//           copies bring them there, and a thread takes its own ones from there twice, so it waits for no other.
// Launch    A row has V = ⌊width·sizeof(T)/16⌋ vectors. grid rows·c, block 256, clusters of c = 1, 2, 4, 8 or 16
//           blocks, the first with V ≤ 1024·c, or else 16. Shared memory: a block's share of both rows, up to 32 KB
//           where c < 16 and up to 224 KB where not, and a value of each warp of the cluster
// Moves     3·rows·width·sizeof(T) bytes; 5·rows·width FLOPs
// Limits    compute capability 9.0 or newer; V ≤ 114688: a row of 1.75 MB; rows·c ≤ 2³¹−1
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/vector.h>
#include <step2/cluster.h>
#include <step2/cp_async.h>
#include <step2/reduce.h>

#include "row.h"
#include "rungs.h"

namespace kf::KF_BACKEND::softmax_backward {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarpSize;
constexpr int kMostBlocks = 16;                // of a cluster
constexpr int64_t kVectorsOfBlock = 1024;      // 32 KB of grad and y: several blocks find room on a multiprocessor
constexpr int64_t kMostVectorsOfBlock = 7168;  // 224 KB, where 16 blocks are not enough for that

// `room`: how many values of y a block's shared memory holds; those of grad follow.
template <class T>
__global__ void __launch_bounds__(kThreads)
    v4_cluster_kernel(const T* __restrict__ grad, const T* __restrict__ y, T* __restrict__ grad_x, int width,
                      int64_t q_length, compute_t<T> scale, int blocks, int room, bool grad_alike, bool out_alike) {
  constexpr int N = 16 / sizeof(T);
  using C = compute_t<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ C sum_of_warp[kMostBlocks * kWarps];  // of all blocks
  const int rank = static_cast<int>(cluster_rank_of_block());
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  cluster_barrier_arrive();  // nobody may store into a block that has not begun: waited for below

  const int64_t row = blockIdx.x / blocks;
  grad += row * width;
  y += row * width;
  grad_x += row * width;
  const Cut<T> cut(y, width);
  const int seen = static_cast<int>(columns_seen(row, width, q_length));
  const int seen_end = min(seen, cut.end);
  const int thread = rank * kThreads + static_cast<int>(threadIdx.x);  // of the cluster
  const int single = cut.single(thread);
  // Calls act(column, where its vector of grad waits, where that of y does) for the vectors of this thread.
  const auto for_each_vector = [&](int end, auto&& act) {
    T* waits = reinterpret_cast<T*>(memory) + threadIdx.x * N;
    for (int c = cut.begin + thread * N; c < end; c += blocks * kThreads * N, waits += kThreads * N) {
      act(c, waits + room, waits);
    }
  };

  for_each_vector(seen_end, [&](int c, T* grad_waits, T* y_waits) {
    cp_async_16(y_waits, y + c);
    if (grad_alike) {
      cp_async_16(grad_waits, grad + c);
    } else {
      *reinterpret_cast<int4*>(grad_waits) = bits_from<false>(grad + c);
    }
  });
  cp_async_commit();
  const C grad_alone = single < seen ? to_compute(grad[single]) : C(0);
  const C y_alone = single < seen ? to_compute(y[single]) : C(0);
  cp_async_wait<0>();

  C sum = y_alone * grad_alone;
  for_each_vector(seen_end, [&](int c, const T* grad_waits, const T* y_waits) {
    sum += dot_of(grad_waits, y_waits, c, seen_end);  // 0 for what is hidden
  });
  sum = warp_sum(sum);

  cluster_barrier_wait();
  if (lane < blocks) store_remote(remote_address(&sum_of_warp[rank * kWarps + warp], lane), sum);
  if (blocks > 1) {
    cluster_sync();  // after it nobody reaches into another block, so each may end when it likes
  } else {
    __syncthreads();
  }

  sum = 0;  // every warp adds all of them up, all in the same order
  for (int i = lane; i < blocks * kWarps; i += kWarpSize) sum += sum_of_warp[i];
  sum = warp_sum(sum);

  for_each_vector(cut.end, [&](int c, const T* grad_waits, const T* y_waits) {
    C value[N] = {};
    if (c < seen) gradients_of(grad_waits, y_waits, sum, scale, c, seen, value);
    if (out_alike) {
      store_values<true>(grad_x + c, value);
    } else {
      store_values<false>(grad_x + c, value);
    }
  });
  if (single < width) grad_x[single] = from_compute<T>(single < seen ? scale * (y_alone * (grad_alone - sum)) : C(0));
}

int64_t blocks_of(const Args& a) {
  int64_t blocks = 1;
  while (blocks < kMostBlocks && vectors_of(a) > blocks * kVectorsOfBlock) blocks *= 2;
  return blocks;
}

}  // namespace

std::string v4_cluster_can_implement(const Args& a) {
  if (compute_capability() < 90) return "needs a GPU of compute capability 9.0 or newer";
  if (vectors_of(a) > kMostBlocks * kMostVectorsOfBlock) {
    return "takes rows of at most 114688 vectors of 16 bytes, got width " + std::to_string(a.width);
  }
  return can_implement_blocks(a.rows, blocks_of(a));
}

void v4_cluster(const Args& a, void* stream) {
  const int64_t blocks = blocks_of(a);
  const int64_t room = 16 * kThreads * ceil_div(vectors_of(a), blocks * kThreads);  // bytes of one of the two
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    launch_in_clusters(v4_cluster_kernel<T>, blocks, dim3(static_cast<unsigned>(a.rows * blocks)), kThreads, 2 * room,
                       stream, static_cast<const T*>(a.grad), static_cast<const T*>(a.y), static_cast<T*>(a.grad_x),
                       static_cast<int>(a.width), mask_of(a), static_cast<compute_t<T>>(a.scale),
                       static_cast<int>(blocks), static_cast<int>(room / sizeof(T)), alike(a.grad, a.y),
                       alike(a.grad_x, a.y));
  });
}

}  // namespace kf::KF_BACKEND::softmax_backward
