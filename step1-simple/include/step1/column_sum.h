// Sums over the rows of a matrix in two stages, each in a fixed order: the same bits in every run.
//
// Atomic additions would need one stage, but their order, and with it the rounding, changes from run to run.
#pragma once

#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/column_grid.h>
#include <step1/vector.h>

namespace kf::KF_BACKEND {

// ---- a column a thread ----

// The sums of one block: 32 lanes side by side, each with a column, and kRows threads one below the other, which take
// the rows from `begin` to `end` in turn. value_at(row, column) is what is added; store(column, sum) gets the result.
// All threads of the block must call this.
template <int kRows, class C, class ValueAt, class Store>
__device__ __forceinline__ void sum_columns(int64_t begin, int64_t end, int64_t width, ValueAt value_at, Store store) {
  __shared__ C sums[kRows][kTileLanes];
  const int64_t column = int64_t{blockIdx.x} * kTileLanes + threadIdx.x;
  C sum = 0;
  if (column < width) {
#pragma unroll 4
    for (int64_t row = begin + threadIdx.y; row < end; row += kRows) sum += value_at(row, column);
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();  // what the threads below have summed is read now
  if (threadIdx.y == 0 && column < width) {
    for (int y = 1; y < kRows; ++y) sum += sums[y][threadIdx.x];
    store(column, sum);
  }
}

// The second stage: adds up what the blocks of the first have left in partial[parts, width].
constexpr int kFinishRows = 32;

template <class T>
__global__ void finish_columns_kernel(const compute_t<T>* __restrict__ partial, T* __restrict__ sum, int64_t parts,
                                      int64_t width) {
  sum_columns<kFinishRows, compute_t<T>>(
      0, parts, width, [&](int64_t part, int64_t column) { return partial[part * width + column]; },
      [&](int64_t column, compute_t<T> total) { sum[column] = from_compute<T>(total); });
}

template <class T>
void finish_columns(const void* partial, void* sum, int64_t parts, int64_t width, void* stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(width, kTileLanes));
  finish_columns_kernel<<<blocks, dim3(kTileLanes, kFinishRows), 0, as_stream(stream)>>>(
      static_cast<const compute_t<T>*>(partial), static_cast<T*>(sum), parts, width);
  check_launch();
}

// Both stages for the rows of x; `scratch` has room for column_grid_by_one's parts.
template <class T>
__global__ void sum_rows_kernel(const T* __restrict__ x, compute_t<T>* __restrict__ partial, int64_t rows,
                                int64_t width, int64_t rows_per_part) {
  const int64_t begin = blockIdx.y * rows_per_part;
  sum_columns<kTileRows, compute_t<T>>(
      begin, min(begin + rows_per_part, rows), width,
      [&](int64_t row, int64_t column) { return to_compute(x[row * width + column]); },
      [&](int64_t column, compute_t<T> total) { partial[blockIdx.y * width + column] = total; });
}

template <class T>
void sum_rows(const T* x, void* scratch, void* sum, int64_t rows, int64_t width, void* stream) {
  const ColumnGrid g = column_grid_by_one(rows, width);
  const dim3 grid(static_cast<unsigned>(g.tiles), static_cast<unsigned>(g.parts));
  sum_rows_kernel<<<grid, dim3(kTileLanes, kTileRows), 0, as_stream(stream)>>>(x, static_cast<compute_t<T>*>(scratch),
                                                                               rows, width, g.rows_per_part);
  check_launch();
  finish_columns<T>(scratch, sum, g.parts, width, stream);
}

// ---- eight columns a thread, whatever the width ----

// 128-bit access wants eight elements that begin at a multiple of eight, counted through the whole matrix. With an odd
// width such groups lie askew: in each row they are shifted against the columns. But eight rows further down the shift
// is the same again, since 8*width is a multiple of 8. So a thread that takes every eighth row keeps the same eight
// columns all the way; only its neighbours below have others. Groups that cross the end of a row belong to two threads.
//
// This gives the first column of the calling thread's eight; it may be below 0, or the last beyond the width.
__device__ __forceinline__ int64_t first_of_eight(int64_t begin, int64_t width) {
  const int64_t shift = (begin + threadIdx.y) * width % 8;
  return int64_t{blockIdx.x} * kEightTile + threadIdx.x * 8 - shift;
}

// values_at(whole, i, first, last, value) fills value[first..last) with what is added for the elements i + first ... of
// the matrix, and the rest of `value` with 0; i is a multiple of 8, and `whole` as for load_some. The block's sums go
// to partial[kEightEntries], where entry e is column 256*blockIdx.x + e - 8. `begin` must be a multiple of 8. All
// threads of the block must call this.
template <class C, class ValuesAt>
__device__ __forceinline__ void sum_columns_by_eight(int64_t begin, int64_t end, int64_t width, C* partial,
                                                     ValuesAt values_at) {
  __shared__ C sums[kTileRows * kEightEntries];
  const int thread = threadIdx.y * kTileLanes + threadIdx.x;
  for (int k = thread; k < kTileRows * kEightEntries; k += kTileRows * kTileLanes) sums[k] = 0;
  __syncthreads();  // zeros first, then sums: a row of threads does not write all of its entries

  const int64_t column = first_of_eight(begin, width);
  const int first = column < 0 ? static_cast<int>(-column) : 0;
  const int last = width - column < 8 ? static_cast<int>(width - column) : 8;
  C sum[8] = {};
  const auto add_rows = [&](auto whole) {
#pragma unroll 1
    for (int64_t row = begin + threadIdx.y; row < end; row += kTileRows) {
      C value[8];
      values_at(whole, row * width + column, first, last, value);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] += value[j];
    }
  };
  if (first == 0 && last == 8) {
    add_rows(std::true_type{});
  } else if (first < last) {
    add_rows(std::false_type{});
  }
  if (first < last) {
    C* own = sums + threadIdx.y * kEightEntries + (column - blockIdx.x * int64_t{kEightTile} + 8);
#pragma unroll
    for (int j = 0; j < 8; ++j) own[j] = sum[j];
  }
  __syncthreads();  // what the other rows of threads have summed is read now

  for (int e = thread; e < kEightEntries; e += kTileRows * kTileLanes) {
    C total = 0;
#pragma unroll
    for (int y = 0; y < kTileRows; ++y) total += sums[y * kEightEntries + e];
    partial[e] = total;
  }
}

// For kernels that draw a dropout mask on the way. In half types five blocks on a multiprocessor, at most 48 registers
// a thread, are faster than three; wider types need more. Before compute capability 8.0 there is room for four. The
// last of a single wave of five would be few, so there are four waves.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
template <class T>
constexpr int kDropoutBlocks = sizeof(T) == 2 ? 4 : 1;
#else
template <class T>
constexpr int kDropoutBlocks = sizeof(T) == 2 ? 5 : 1;
#endif
constexpr int kDropoutWaves = 4;

// Where a block leaves its sums.
template <class C>
__device__ __forceinline__ C* own_partial(C* partial) {
  return partial + (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * kEightEntries;
}

// The second stage for these: a column's sums stand in its own tile, and if it is one of a tile's last 8, in the
// next too.
template <class T>
__global__ void finish_columns_by_eight_kernel(const compute_t<T>* __restrict__ partial, T* __restrict__ sum,
                                               int64_t parts, int64_t tiles, int64_t width) {
  using C = compute_t<T>;
  sum_columns<kFinishRows, C>(
      0, parts, width,
      [&](int64_t part, int64_t column) {
        const int64_t tile = column / kEightTile, place = column % kEightTile;
        const C* own = partial + (part * tiles + tile) * kEightEntries;
        const bool in_next = place >= kEightTile - 8 && tile + 1 < tiles;
        return own[8 + place] + (in_next ? own[kEightEntries + place - (kEightTile - 8)] : C(0));
      },
      [&](int64_t column, C total) { sum[column] = from_compute<T>(total); });
}

template <class T>
void finish_columns_by_eight(const void* partial, void* sum, const ColumnGrid& grid, int64_t width, void* stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(width, kTileLanes));
  finish_columns_by_eight_kernel<<<blocks, dim3(kTileLanes, kFinishRows), 0, as_stream(stream)>>>(
      static_cast<const compute_t<T>*>(partial), static_cast<T*>(sum), grid.parts, grid.tiles, width);
  check_launch();
}

}  // namespace kf::KF_BACKEND
