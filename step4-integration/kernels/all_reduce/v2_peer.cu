// all_reduce v2_peer: one shot, each worker reads the others' memory
//
// Idea      NCCL's ring is made for bytes: 2·(workers−1) steps, each with its latency. Where GPUs see each other's
//           memory a step is enough: all lay their x open, say so, wait until all have, and each reads all and adds.
//           That is workers/2 times the ring's bytes, for two workers as many. A block does so with a piece of x, and
//           then with the next one, whatever the other blocks do. A store with release says it: who reads it with
//           acquire sees the piece too, and .sys says that both may be on different devices. Nobody waits at the end:
//           there are two pieces, taken in turns, and who is at one has read the other. The turn's number is in memory,
//           so that a CUDA graph replays.
// Since v1  Kernels of our own for the sum. LayerNorm still is another launch.
// Launch    twice: up to 512 blocks of 256 threads; grid rows, block up to 512 threads. Both dependent
//           (step2/dependent_launch.h)
// Moves     (7 + workers)·rows·width·sizeof(T) bytes: x to the buffer, all workers' pieces, the sum; then LayerNorm
//           reads it, and the residual, and writes both. (workers−1)·rows·width·sizeof(T) of them by NVLink
// Limits    up to 8 workers, width ≤ 4096, not float64; rounds the sum of x
#include <step2/dependent_launch.h>

#include "row_end.h"
#include "rungs.h"

namespace kf::KF_BACKEND::all_reduce {
namespace {

constexpr int kThreads = 256;

template <int N, class T>
__global__ void __launch_bounds__(kThreads) sum_kernel(const Args a, int piece) {
  launch_dependent_grids();
  wait_on_dependent_grids();  // x is there
  const int64_t n = a.rows * a.width;
  uint32_t turn = header_of(a, a.rank)->pulled[blockIdx.x];
  for (int64_t first = int64_t{blockIdx.x} * piece; first < n; first += int64_t{gridDim.x} * piece) {
    const int count = static_cast<int>(n - first < piece ? n - first : piece);
    const auto for_each = [&](auto f) {
#pragma unroll 4
      for (int i = static_cast<int>(threadIdx.x) * N; i < count; i += kThreads * N) f(i);
    };
    ++turn;
    T* const own = piece_of<T>(a, a.rank, turn);
    for_each([&](int i) { store_vector<N>(own + i, load_vector<N>(static_cast<const T*>(a.x) + first + i)); });
    meet(a, turn);
    for_each([&](int i) {
      compute_t<T> sum[N] = {};
      sum_pieces<N, T>(a, turn, i, sum);
      store_vector<N>(static_cast<T*>(a.sum) + first + i, narrow<T>(sum));
    });
  }
  if (threadIdx.x == 0) header_of(a, a.rank)->pulled[blockIdx.x] = turn;
}

template <int kItems, int N, class T>
__global__ void __launch_bounds__(kMostThreads, 1) norm_kernel(const Args a) {
  launch_dependent_grids();
  wait_on_dependent_grids();  // the sum is there
  __shared__ compute_t<T> shared[kWarpSize];
  RowEnd<kItems, N, T> end(a, blockIdx.x);
  compute_t<T> value[kItems][N] = {};
  for_each_vector<kItems, N>(static_cast<int>(a.width), [&](int i, int column) {
    widen(load_vector<N>(static_cast<const T*>(a.sum) + end.first + column), value[i]);
  });
  end.finish(value, shared);
}

}  // namespace

void v2_peer(const Args& a, void* stream) {
  with_row(a, [&](auto type, auto items, auto n, unsigned threads) {
    using T = typename decltype(type)::element;
    constexpr int N = decltype(n)::value;
    // A piece a block where they are enough; small ones have 4 KB, so that few blocks have to meet.
    constexpr int64_t kLeast = 4096 / sizeof(T), kMost = kPieceBytes / sizeof(T);
    const int64_t share = ceil_div(ceil_div(a.rows * a.width, kMostBlocks), N) * N;
    const int64_t piece = share < kLeast ? kLeast : share > kMost ? kMost : share;
    const int64_t pieces = ceil_div(a.rows * a.width, piece);
    launch_dependent(sum_kernel<N, T>, blocks_of(pieces), kThreads, 0, stream, a, static_cast<int>(piece));
    launch_dependent(norm_kernel<decltype(items)::value, N, T>, static_cast<unsigned>(a.rows), threads, 0, stream, a);
  });
}

}  // namespace kf::KF_BACKEND::all_reduce
