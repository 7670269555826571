// residual_layer_norm v4_cluster: a cluster shares a row that one multiprocessor cannot hold
//
// Idea      layer_norm's v4 with the residual added where the row is loaded. x_bias and dropout change x when it has
//           come.
// Since v3  Up to 16 blocks for a row, which meet once. Wider rows went through two launches, and their sum was read
//           three times.
// Launch    as layer_norm's v4_cluster
// Moves     4·rows·width·sizeof(T) bytes; about 11·rows·width FLOPs. With x_bias width·sizeof(T) more; dropout moves
//           nothing
// Limits    compute capability 9.0 or newer; width ≤ 131072; rows·c ≤ 2³¹−1, c the blocks of a row. Of narrow rows
//           most threads have nothing
#include <step3/cluster_row.h>
#include <step3/front.h>

#include "rungs.h"

namespace kf::KF_BACKEND::residual_layer_norm {
namespace {

// For so many blocks beside each other a multiprocessor has registers: some load while others compute. Mostly
// fewer than layer_norm has: the sum is held as floats.
template <class Row, class C>
constexpr int kBlocksBeside = sizeof(C) == 8 || Row::kItems * Row::N > 48 ? 1
                              : Row::kItems * Row::N > 24                 ? 2
                                                                          : 3;

template <class Row, class T, class Front, class C = compute_t<T>>
__global__ void __launch_bounds__(Row::kThreads, kBlocksBeside<Row, C>)
    v4_cluster_kernel(const T* __restrict__ x, const T* __restrict__ residual, const T* __restrict__ weight,
                      const T* __restrict__ bias, T* __restrict__ y, T* __restrict__ sum, Kept<C> kept, int width,
                      C eps, int blocks, Front front) {
  constexpr int N = Row::N;
  __shared__ Meeting<C> meeting;
  const int rank = static_cast<int>(cluster_rank_of_block());
  if (threadIdx.x == 0) meeting.init();
  __syncwarp();
  cluster_barrier_arrive_relaxed();
  const int64_t row = blockIdx.x / blocks;
  const int begin = Row::first_of(rank), own_width = Row::width_of(rank, width);
  const int64_t first = row * width + begin;

  front.read();
  C value[Row::kItems][N] = {};
  using Loaded = typename Front::template Loaded<T, N>;
  Loaded one[Row::kItems], other[Row::kItems];
  Row::for_each_piece(own_width, [&](int i, int column) {
    one[i] = load_as<Loaded>(x + first + column);
    other[i] = load_as<Loaded>(residual + first + column);
  });
  Row::for_each_piece(own_width, [&](int i, int column) {
    C more[N];
    widen(one[i], value[i]);
    front.apply(first + column, begin + column, value[i]);
    widen(other[i], more);
#pragma unroll
    for (int j = 0; j < N; ++j) value[i][j] += more[j];
    store_vector<N>(sum + first + column, narrow<T>(value[i]));
  });
  const HeldValues<Row, C> get{value};
  const Statistics<C> s = meeting.template statistics_of<Row>(get, own_width, width, eps, rank, blocks);
  if (rank == 0 && threadIdx.x == 0) kept.keep(row, s);
  store_pieces<Row, LoadWeights::kWhereNeeded>(get, s, own_width, weight + begin, bias + begin, y + first);
}

}  // namespace

std::string v4_cluster_can_implement(const Args& a) { return can_implement_in_cluster(a.rows, a.width); }

void v4_cluster(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const bool aligned = aligned_16(a.x, a.residual, a.weight, a.bias, a.y, a.sum, a.x_bias);
    with_cluster_row<T>(a.width, aligned, [&](auto shape, int64_t blocks) {
      using Row = decltype(shape);
      with_front<T>(a, [&](auto front) {
        launch_in_clusters(v4_cluster_kernel<Row, T, decltype(front)>, blocks,
                           dim3(static_cast<unsigned>(a.rows * blocks)), Row::kThreads, 0, stream,
                           static_cast<const T*>(a.x), static_cast<const T*>(a.residual),
                           static_cast<const T*>(a.weight), static_cast<const T*>(a.bias), static_cast<T*>(a.y),
                           static_cast<T*>(a.sum), kept_of<T>(a), static_cast<int>(a.width),
                           static_cast<compute_t<T>>(a.eps), static_cast<int>(blocks), front);
      });
    });
  });
}

}  // namespace kf::KF_BACKEND::residual_layer_norm
