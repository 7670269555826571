// layer_norm v4_cluster: a cluster shares a row that one multiprocessor cannot hold
//
// Idea      The registers of one multiprocessor hold 65536 numbers at the very most, and v3 ends at rows of 16384.
//           Blocks of a cluster run at the same time and reach into each other's shared memory: together they hold a
//           row of 131072, and it is still read once.
// Since v3  Up to 16 blocks for a row. A meeting of a cluster takes longer than one of a block, so there is one, not
//           two: each warp takes the mean and the squares of its own values, in two passes, and stores them into every
//           block; whoever has all of them puts them together (include/step3/cluster_row.h).
// Launch    grid rows·c, block 256, clusters of c = ⌈width/8192⌉ blocks, two or more; half types in vectors
//           ⌈width/16384⌉. A thread holds up to 32 values, 64 of half types in vectors. 2 KB of shared memory, 4 KB
//           for float64
// Moves     2·rows·width·sizeof(T) bytes; about 10·rows·width FLOPs
// Limits    compute capability 9.0 or newer; width ≤ 131072; rows·c ≤ 2³¹−1. Of narrow rows most threads have
//           nothing
#include <step3/cluster_row.h>

#include "rungs.h"

namespace kf::KF_BACKEND::layer_norm {
namespace {

// For so many blocks beside each other a multiprocessor has registers: some load while others compute.
template <class Row, class T>
constexpr int kBlocksBeside = sizeof(T) == 8                  ? 2
                              : sizeof(T) == 4 || Row::N == 1 ? 3
                                                              : 4;

template <class Row, class T, class C = compute_t<T>>
__global__ void __launch_bounds__(Row::kThreads, kBlocksBeside<Row, T>)
    v4_cluster_kernel(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                      T* __restrict__ y, Kept<C> kept, int width, C eps, int blocks) {
  __shared__ Meeting<C> meeting;
  const int rank = static_cast<int>(cluster_rank_of_block());
  if (threadIdx.x == 0) meeting.init();
  __syncwarp();
  cluster_barrier_arrive_relaxed();
  const int64_t row = blockIdx.x / blocks;
  const int first = Row::first_of(rank), own_width = Row::width_of(rank, width);
  x += row * width + first;

  Vector<T, Row::N> held[Row::kItems];  // as they came: half types take half the registers of floats
  Row::for_each_piece(own_width, [&](int i, int column) { held[i] = load_vector<Row::N>(x + column); });
  const auto get = [&](int i, C(&value)[Row::N]) { widen_anew(held[i], value); };
  const Statistics<C> s = meeting.template statistics_of<Row>(get, own_width, width, eps, rank, blocks);
  if (rank == 0 && threadIdx.x == 0) kept.keep(row, s);
  store_pieces<Row, LoadWeights::kWhereNeeded>(get, s, own_width, weight + first, bias + first,
                                               y + row * width + first);
}

}  // namespace

std::string v4_cluster_can_implement(const Args& a) { return can_implement_in_cluster(a.rows, a.width); }

void v4_cluster(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    with_cluster_row<T>(a.width, aligned_16(a.x, a.weight, a.bias, a.y), [&](auto shape, int64_t blocks) {
      using Row = decltype(shape);
      launch_in_clusters(v4_cluster_kernel<Row, T>, blocks, dim3(static_cast<unsigned>(a.rows * blocks)), Row::kThreads,
                         0, stream, static_cast<const T*>(a.x), static_cast<const T*>(a.weight),
                         static_cast<const T*>(a.bias), static_cast<T*>(a.y), kept_of<T>(a), static_cast<int>(a.width),
                         static_cast<compute_t<T>>(a.eps), static_cast<int>(blocks));
    });
  });
}

}  // namespace kf::KF_BACKEND::layer_norm
