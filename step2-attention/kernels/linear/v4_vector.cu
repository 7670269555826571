// linear v4_vector: 128-bit loads, and the next tile is in flight while this one is multiplied
//
// Idea      v3 waits for each tile, at two barriers, and loads element by element. Here the next tile's loads, 16 bytes
//           each, start before this tile is multiplied, and wait in registers. There are two tiles of each operand in
//           shared memory: while some threads still read one, others fill the other.
// Since v3  Vectors from global memory, where the neighbours' dimension is a multiple of 16/sizeof(T) and tensors begin
//           at a multiple of 16 bytes, else element by element. Vectors of 16 bytes from shared memory: a thread's 8
//           rows are two runs of four. Two stages for tiles, one barrier a tile.
// Launch    grid (⌈width/128⌉, ⌈rows/128⌉), block 256, 33.8 KB shared memory
// Moves     (rows·depth + depth·width + rows·width + width)·sizeof(T) bytes at the least; the rest as v3, but a fourth
//           of the instructions for it, or an eighth of those that load half types
// Limits    rows ≤ 128·65535, width ≤ 128·(2³¹−1). CUDA cores: a multiprocessor has 128, 256 FLOP a cycle in float32.
//           The tensor cores of one of Hopper's do 4096 in half types
#include <step1/vector.h>

#include "operands.h"

namespace kf::KF_BACKEND::linear {
namespace {

constexpr int kTile = 128, kThreads = 256, kEach = 8, kApart = kTile / kEach;
constexpr int kStride = kTile + 4;  // a multiple of four, for vectors
template <class C>
constexpr int kDepth = 64 / sizeof(C);  // of a tile

// A thread's part of a tile of 128 × kDepth elements: vectors of N neighbours in memory. i goes along the rows of x or
// the columns of the weight.
template <class T, int N, class C = compute_t<T>>
struct TileLoader {
  static constexpr int kVectors = kTile * kDepth<C> / N / kThreads;
  Vector<T, N> vector[kVectors];

  // Calls f(vector, i, k) for each.
  template <class F>
  __device__ __forceinline__ void for_each(bool along_i, F f) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int number = v * kThreads + static_cast<int>(threadIdx.x);
      if (along_i) {
        f(vector[v], number % (kTile / N) * N, number / (kTile / N));
      } else {
        f(vector[v], number / (kDepth<C> / N), number % (kDepth<C> / N) * N);
      }
    }
  }
  // No vector crosses an edge: its dimension is a multiple of N.
  __device__ __forceinline__ void load(const Matrix<T>& m, int64_t first, int64_t end, int64_t first_k, int64_t depth) {
    for_each(m.row == 1, [&](Vector<T, N>& v, int i, int k) {
      const bool inside = first + i < end && first_k + k < depth;
      v = inside ? load_vector<N>(m.data + (first + i) * m.row + (first_k + k) * m.column) : Vector<T, N>{};
    });
  }
  __device__ __forceinline__ void store(bool along_i, C (*tile)[kStride]) {
    for_each(along_i, [&](Vector<T, N>& v, int i, int k) {
#pragma unroll
      for (int j = 0; j < N; ++j) tile[along_i ? k : k + j][along_i ? i + j : i] = to_compute(v.element[j]);
    });
  }
};

template <class T, int N, class C = compute_t<T>>
__global__ void __launch_bounds__(kThreads, sizeof(C) == 4 && N > 1 ? 2 : 1)
    v4_vector_kernel(Matrix<T> x, Matrix<T> weight_columns, const T* __restrict__ bias, T* __restrict__ y, int64_t rows,
                     int64_t depth, int64_t width) {
  constexpr int kRun = 16 / sizeof(C);  // neighbours in one load from shared memory
  __shared__ __align__(16) C x_tile[2][kDepth<C>][kStride], weight_tile[2][kDepth<C>][kStride];
  const int64_t first_row = int64_t{blockIdx.y} * kTile, first_column = int64_t{blockIdx.x} * kTile;
  const int tx = threadIdx.x % kApart, ty = threadIdx.x / kApart;
  const auto position_of = [](int t, int i) { return i / kRun * kApart * kRun + t * kRun + i % kRun; };

  TileLoader<T, N> of_x, of_weight;
  const auto load = [&](int64_t first_k) {
    of_x.load(x, first_row, rows, first_k, depth);
    of_weight.load(weight_columns, first_column, width, first_k, depth);
  };
  C sum[kEach][kEach] = {};
  load(0);
  int buffer = 0;
  for (int64_t first_k = 0; first_k < depth; first_k += kDepth<C>, buffer ^= 1) {
    of_x.store(x.row == 1, x_tile[buffer]);
    of_weight.store(weight_columns.row == 1, weight_tile[buffer]);
    __syncthreads();  // the tiles are whole; and nobody reads those of the step before any more
    load(first_k + kDepth<C>);
#pragma unroll 4
    for (int k = 0; k < kDepth<C>; ++k) {
      C row[kEach], column[kEach];
#pragma unroll
      for (int i = 0; i < kEach; i += kRun) {
        const auto r = load_vector<kRun>(&x_tile[buffer][k][position_of(ty, i)]);
        const auto c = load_vector<kRun>(&weight_tile[buffer][k][position_of(tx, i)]);
#pragma unroll
        for (int j = 0; j < kRun; ++j) row[i + j] = r.element[j], column[i + j] = c.element[j];
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) sum[i][j] += row[i] * column[j];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int64_t row = first_row + position_of(ty, i), column = first_column + position_of(tx, j);
      if (row < rows && column < width) y[row * width + column] = from_compute<T>(sum[i][j] + bias_at(bias, column));
    }
  }
}

}  // namespace

std::string v4_vector_can_implement(const Args& a) { return can_implement_grid<kTile, kTile>(a); }

void v4_vector(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    constexpr int N = 16 / sizeof(T);
    const bool vectors = (a.x_transposed ? a.rows : a.depth) % N == 0 &&
                         (a.weight_transposed ? a.depth : a.width) % N == 0 && aligned_16(a.x, a.weight);
    const dim3 grid(static_cast<unsigned>(ceil_div(a.width, kTile)), static_cast<unsigned>(ceil_div(a.rows, kTile)));
    const auto kernel = vectors ? v4_vector_kernel<T, N> : v4_vector_kernel<T, 1>;
    kernel<<<grid, kThreads, 0, as_stream(stream)>>>(x_of<T>(a), weight_columns_of<T>(a), static_cast<const T*>(a.bias),
                                                     static_cast<T*>(a.y), a.rows, a.depth, a.width);
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::linear
