// all_reduce v3_fused: the sum over workers, bias, residual and LayerNorm in one launch
//
// Idea      A block that takes whole rows has all that LayerNorm needs: the sum stays in registers. While it waits for
//           the other workers, residual and weights come.
// Since v2  One launch. The sum is not rounded on the way, and neither written nor read in between.
// Launch    grid rows, up to 512; block up to 256 threads, up to 512 for wide rows. Dependent
//           (step2/dependent_launch.h)
// Moves     (5 + workers)·rows·width·sizeof(T) bytes: x to the buffer, all workers' pieces, the residual, two outputs.
//           (workers−1)·rows·width·sizeof(T) of them by NVLink
// Limits    up to 8 workers, width ≤ 4096, not float64
#include <step2/dependent_launch.h>

#include "row_end.h"
#include "rungs.h"

namespace kf::KF_BACKEND::all_reduce {
namespace {

template <int kItems, int N, class T>
__global__ void __launch_bounds__(kMostThreads, 1) v3_fused_kernel(const Args a) {
  launch_dependent_grids();
  wait_on_dependent_grids();  // x is there
  __shared__ compute_t<T> shared[kWarpSize];
  const int width = static_cast<int>(a.width);
  uint32_t turn = header_of(a, a.rank)->pulled[blockIdx.x];
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    ++turn;
    T* const own = piece_of<T>(a, a.rank, turn);
    for_each_vector<kItems, N>(width, [&](int, int column) {
      store_vector<N>(own + column, load_vector<N>(static_cast<const T*>(a.x) + row * a.width + column));
    });
    RowEnd<kItems, N, T> end(a, row);
    meet(a, turn);
    compute_t<T> value[kItems][N] = {};
    for_each_vector<kItems, N>(width, [&](int i, int column) { sum_pieces<N, T>(a, turn, column, value[i]); });
    end.finish(value, shared);
  }
  if (threadIdx.x == 0) header_of(a, a.rank)->pulled[blockIdx.x] = turn;
}

}  // namespace

void v3_fused(const Args& a, void* stream) {
  with_row(a, [&](auto type, auto items, auto n, unsigned threads) {
    const auto kernel = v3_fused_kernel<decltype(items)::value, decltype(n)::value, typename decltype(type)::element>;
    launch_dependent(kernel, blocks_of(a.rows), threads, 0, stream, a);
  });
}

}  // namespace kf::KF_BACKEND::all_reduce
