// What follows attention in attention_block's v5: the projection, 64 columns at a time, and the rows' ends.
#pragma once

#include <step1/vector.h>
#include <step2/cluster.h>
#include <step2/cp_async.h>
#include <step2/mbarrier.h>
#include <step2/mma.h>
#include <step3/dropout.h>
#include <step3/statistics.h>

#include "cluster_attend.h"
#include "clusters.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_block {

constexpr int kGroup = 64;  // columns that a warp projects at once

// rows · weight for 16 rows and 64 columns, over a part of the depth. A lane asks for eight neighbours of the weight's
// rows 2t, 2t + 1, 2t + 8 and 2t + 9, 16 bytes each, and pairs two rows' values of a column, as attention's warps do
// with values; as there, it waits for its own copies only.
template <class T>
struct WarpProjection {
  static constexpr int kAhead = WarpMemory::kWeightStages;
  const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
  WarpMemory& memory;
  const int head_dim, width, k_tiles;  // a tile of the depth: 16 of the depth, or the last ones of a head
  const int head, column;              // where the first one begins
  int in_head;                         // where the one to be asked for next begins
  const T* from;                       // this lane's part of it
  float sum[8][4] = {};                // [e][j]: row g + 8·(j / 2), column 8·(2t + j % 2) + e of the 64

  // To columns `to` and following. Those beyond the last are read as column 0, and their sums are nobody's.
  __device__ __forceinline__ WarpProjection(WarpMemory& memory, const T* weight, int head_dim, int width, int head,
                                            int column, int k_tiles, int to)
      : memory(memory),
        head_dim(head_dim),
        width(width),
        k_tiles(k_tiles),
        head(head),
        column(column),
        in_head(column),
        from(weight + int64_t{head * head_dim + column + 2 * t} * width + (to + g * 8 < width ? to + g * 8 : 0)) {}

  __device__ __forceinline__ void issue_load(int k_tile) {
    if (k_tile < k_tiles) {
      Words(&stage)[4][kWarpSize] = memory.weight[k_tile % kAhead];
      const bool whole = in_head + 8 < head_dim;  // or the last 8 of 16 become 0, as what they are multiplied by
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool there = i < 2 || whole;
        cp_async_16(&stage[i][weight_slot()], there ? from + (i / 2 * 8 + i % 2) * width : from, there ? 16 : 0);
      }
      from += (whole ? 16 : 8) * width;
      in_head = in_head + 16 < head_dim ? in_head + 16 : 0;
    }
    cp_async_commit();
  }

  // rows: [heads][kRows][kRowStride] in shared memory, zeros beyond head_dim; ready() is called before they are read.
  template <class Ready>
  __device__ __forceinline__ void run(const T* rows, Ready ready) {
#pragma unroll 1
    for (int k_tile = 0; k_tile < kAhead; ++k_tile) issue_load(k_tile);
    ready();
    const int matrix = threadIdx.x % kWarpSize / 8, matrix_row = threadIdx.x % 8;
    const T* of_head = rows + (head * kRows + matrix % 2 * 8 + matrix_row) * kRowStride + matrix / 2 * 8;
    int c = column;
#pragma unroll 2
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      cp_async_wait<kAhead - 1>();
      uint32_t a[4];
      ldmatrix<4>(a, of_head + c);
      c += 16;
      if (c >= head_dim) of_head += kRows * kRowStride, c = 0;
      Words w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = memory.weight[k_tile % kAhead][i][weight_slot()];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const unsigned halves = e % 2 == 0 ? 0x5410 : 0x7632;
        const auto pair = [&](int i) { return __byte_perm(w[i].element[e / 2], w[i + 1].element[e / 2], halves); };
        mma_m16n8k16<T>(sum[e], a, {pair(0), pair(2)});
      }
      issue_load(k_tile + kAhead);
    }
  }

  // to: the first of the 64 columns of the first row, rows `stride` floats apart.
  __device__ __forceinline__ void leave(float* to, int stride) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int j = i / 2, e = i % 2 * 4;
      store_vector(to + (g + j / 2 * 8) * stride + 8 * (2 * t + j % 2) + e,
                   Vector<float, 4>{{sum[e][j], sum[e + 1][j], sum[e + 2][j], sum[e + 3][j]}});
    }
  }
};

// Eight neighbours to the same place in the shared memory of all blocks of the cluster, where `arrived` counts the
// bytes.
template <class T>
__device__ __forceinline__ void send(const Vector<T, 8>& eight, T* to, uint64_t* arrived, int blocks) {
  if (blocks == 1) return store_vector(to, eight);
  uint32_t words[4];
  memcpy(words, &eight, sizeof words);
#pragma unroll 2
  for (int b = 0; b < blocks; ++b) {
    store_remote_async(remote_address(to, b), words, remote_address(arrived, b));
  }
}

// What follows the product, for one block's columns.
template <class T>
struct Rest {
  const T *residual, *proj_weight, *proj_bias, *weight, *bias;
  T *y, *sum, *attended;
  Kept<float> kept;
  ElementwiseDropout<float> dropout;
  int width;
  float eps;
};

template <class T>
Rest<T> rest_of(const Args& a) {
  Rest<T> rest{};
  rest.residual = static_cast<const T*>(a.residual);
  rest.proj_weight = static_cast<const T*>(a.proj_weight);
  rest.proj_bias = static_cast<const T*>(a.proj_bias);
  rest.weight = static_cast<const T*>(a.weight);
  rest.bias = static_cast<const T*>(a.bias);
  rest.y = static_cast<T*>(a.y);
  rest.sum = static_cast<T*>(a.sum);
  rest.attended = static_cast<T*>(a.attended);
  rest.kept = kept_of<T>(a);
  rest.dropout = {{a.rng_state, a.seed, a.offset}, a.threshold, keep_scale<float>(a.threshold)};
  rest.width = static_cast<int>(a.attention.heads * a.attention.head_dim);
  rest.eps = static_cast<float>(a.eps);
  return rest;
}

// What the row's end adds, of a block's columns, in shared memory: asked for when the first heads are done, so that it
// is there when the product is. Where the columns are done in several rounds, it stays in global memory.
template <class T>
struct Preloaded {
  T* first;  // [kRows + 3][columns]: the residual, proj_bias, weight and bias; null: in global memory
  int columns;

  // From column `from` on, of `rows` rows from row `row` of all on.
  __device__ __forceinline__ void issue_load(const Rest<T>& rest, int64_t row, int rows, int from) const {
    const int warps = blockDim.x / kWarpSize;
#pragma unroll 1
    for (int r = threadIdx.x / kWarpSize; r < kRows + 3; r += warps) {
      const T* const source = r < kRows        ? rest.residual + (row + min(r, rows - 1)) * rest.width
                              : r == kRows     ? rest.proj_bias
                              : r == kRows + 1 ? rest.weight
                                               : rest.bias;
#pragma unroll 1
      for (int c = threadIdx.x % kWarpSize * 8; c < columns; c += kWarpSize * 8) {
        cp_async_16(first + r * columns + c, source + from + c);
      }
    }
  }
  __device__ __forceinline__ const T* row(const Rest<T>& rest, int row, int64_t global, int from) const {
    return first != nullptr ? first + row * columns : rest.residual + global * rest.width + from;
  }
  __device__ __forceinline__ const T* vector(int i, const T* global, int from) const {
    return first != nullptr ? first + (kRows + i) * columns : global + from;
  }
};

// Some columns of the block's rows, 16 lanes a row and four columns a lane: the sum, and what is known of its
// statistics.
template <class T>
struct RowColumns {
  static constexpr int N = 4;
  const Rest<T>& rest;
  float* const sums;  // [parts of the depth][kRows][stride]
  const int stride, parts;
  int first, columns;
  const Preloaded<T> preloaded;
  const int lane = threadIdx.x % kRowLanes;

  // Calls f(c) for each first of N columns that this lane has, counted from the first.
  template <class F>
  __device__ __forceinline__ void each(F f) const {
#pragma unroll 1
    for (int c = lane * N; c < columns; c += kRowLanes * N) f(c);
  }

  // Row `row` of the block is row `global` of all, if it exists.
  __device__ __forceinline__ RowShare add(int row, int64_t global, bool exists) const {
    const int64_t at = global * rest.width + first;
    float* const own = sums + row * stride;
    float total = 0, left = 0, squares = 0;
    each([&](int c) {
      if (!exists) return;
      float x[N], residual[N];
      const auto more = load_vector<N>(preloaded.row(rest, row, global, first) + c);
      widen(load_vector<N>(preloaded.vector(0, rest.proj_bias, first) + c), x);
#pragma unroll 4
      for (int part = 0; part < parts; ++part) {
        const auto from = load_vector<N>(own + part * kRows * stride + c);
#pragma unroll
        for (int j = 0; j < N; ++j) x[j] += from.element[j];
      }
      rest.dropout.apply_aligned(at + c, x);
      widen(more, residual);
#pragma unroll
      for (int j = 0; j < N; ++j) x[j] += residual[j], total += x[j];
      store_vector(rest.sum + at + c, narrow<T>(x));
      store_vector(own + c, narrow<float>(x));
    });
    const float mean = columns == 0 ? 0.0f : row_sum(total) / static_cast<float>(columns);
    each([&](int c) {
      const auto x = load_vector<N>(own + c);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float off = x.element[j] - mean;
        left += off, squares += off * off;
      }
    });
    return {{mean, row_sum(left)}, {row_sum(squares), static_cast<float>(columns)}};
  }

  // x: the row's sum, as float or as T.
  template <class X>
  __device__ __forceinline__ void normalize(int64_t global, const Statistics<float>& of_row, const X* x) const {
    each([&](int c) {
      float weight[N], bias[N], sum[N];
      widen(load_vector<N>(preloaded.vector(1, rest.weight, first) + c), weight);
      widen(load_vector<N>(preloaded.vector(2, rest.bias, first) + c), bias);
      widen(load_vector<N>(x + c), sum);
#pragma unroll
      for (int j = 0; j < N; ++j) bias[j] += of_row.normalize(sum[j]) * weight[j];
      store_vector(rest.y + global * rest.width + first + c, narrow<T>(bias));
    });
  }
};

}  // namespace kf::KF_BACKEND::attention_block
