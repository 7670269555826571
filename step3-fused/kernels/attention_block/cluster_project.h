// What follows attention in attention_block's v5: 64 columns of the projection after the other, and the row's end.
#pragma once

#include <step1/vector.h>
#include <step2/cluster.h>
#include <step2/mbarrier.h>
#include <step2/mma.h>
#include <step3/dropout.h>
#include <step3/statistics.h>

namespace kf::KF_BACKEND::attention_block {

constexpr int kMostBlocks = 16;  // of a cluster
constexpr int kGroup = 64;  // columns that a warp projects at once
constexpr int kAhead = 4;   // steps of 16 of the depth whose weights are on their way

// rows · weight for 16·kTiles rows and 64 columns, over the depth from step `step` to before `last`. A lane loads eight
// neighbours of the weight's rows 2t, 2t + 1, 2t + 8 and 2t + 9, 16 bytes each, and pairs two rows' values of a column,
// as attention's warps do with values: the weight goes from the L2 cache into registers, and nowhere else.
template <int kTiles, class T>
struct WarpProjection {
  const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
  const T* const weight;
  const int width, column;  // this lane's first
  int step, last;
  Vector<uint32_t, 4> ahead[kAhead][4];
  float sum[kTiles][8][4] = {};  // [16 rows][e][j]: row g + 8·(j / 2), column 8·(2t + j % 2) + e of the 64

  __device__ WarpProjection(const T* weight, int width, int first_column, int step, int last)
      : weight(weight), width(width), column(first_column + g * 8), step(step), last(last) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) fetch(i, step + i);
  }

  __device__ __forceinline__ void fetch(int place, int of_step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = of_step * 16 + 2 * t + i / 2 * 8 + i % 2;
      ahead[place][i] = {};
      if (of_step < last && k < width && column < width) {
        const auto four = __ldg(reinterpret_cast<const uint4*>(weight + int64_t{k} * width + column));
        ahead[place][i] = {{four.x, four.y, four.z, four.w}};
      }
    }
  }

  // rows: in shared memory, zeros from column `width` to the next multiple of 16.
  __device__ __forceinline__ void run(const T* rows, int stride) {
    const int matrix = threadIdx.x % kWarpSize / 8, matrix_row = threadIdx.x % 8;
    const T* const own = rows + (matrix % 2 * 8 + matrix_row) * stride + matrix / 2 * 8;
    for (; step < last; step += kAhead) {
#pragma unroll
      for (int place = 0; place < kAhead; ++place) {
        if (step + place >= last) break;
        uint32_t a[kTiles][4];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) ldmatrix<4>(a[tile], own + tile * 16 * stride + (step + place) * 16);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const unsigned halves = e % 2 == 0 ? 0x5410 : 0x7632;
          const auto pair = [&](int i) {
            return __byte_perm(ahead[place][i].element[e / 2], ahead[place][i + 1].element[e / 2], halves);
          };
          const uint32_t pairs[2] = {pair(0), pair(2)};
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) mma_m16n8k16<T>(sum[tile][e], a[tile], pairs);
        }
        fetch(place, step + kAhead + place);
      }
    }
  }

  // to: the first of the 64 columns of the first row, rows `stride` floats apart.
  __device__ __forceinline__ void leave(float* to, int stride) const {
#pragma unroll
    for (int i = 0; i < kTiles * 8; ++i) {
      const int tile = i / 8, j = i / 2 % 4, e = i % 2 * 4;
      const auto& of = sum[tile];
      store_vector(to + (tile * 16 + g + j / 2 * 8) * stride + 8 * (2 * t + j % 2) + e,
                   Vector<float, 4>{{of[e][j], of[e + 1][j], of[e + 2][j], of[e + 3][j]}});
    }
  }
};

// Of a row some columns, as a block knows them: to be put together by the formula of Chan, Golub and LeVeque (see
// cluster_row.h).
struct RowShare {
  Pair<float> mean_and_rest;      // rest: the sum of x − mean
  Pair<float> squares_and_count;  // squares: the sum of (x − mean)²
};

// The statistics of a row from the blocks' shares of it, in their order; each is `apart` after the one before.
__device__ inline Statistics<float> statistics_of(const RowShare* share, int apart, int blocks, int width, float eps) {
  float mean = 0, rest = 0, squares = 0;
  for (int i = 0; i < blocks; ++i) {
    mean += share[i * apart].mean_and_rest.first * share[i * apart].squares_and_count.second;
  }
  mean /= static_cast<float>(width);
  for (int i = 0; i < blocks; ++i) {
    const RowShare& s = share[i * apart];
    const float off = s.mean_and_rest.first - mean, of_count = s.squares_and_count.second * off;
    rest += s.mean_and_rest.second + of_count;
    squares += s.squares_and_count.first + off * (2 * s.mean_and_rest.second + of_count);
  }
  return statistics(mean, rest, squares, width, eps);
}

// Of `lanes` neighbouring lanes, a power of 2.
__device__ __forceinline__ float sum_of_lanes(float x, int lanes) {
  for (int away = lanes / 2; away > 0; away /= 2) x += __shfl_xor_sync(kFullWarp, x, away);
  return x;
}

// What follows the product, for one block's columns.
template <class T>
struct Rest {
  const T *residual, *proj_weight, *proj_bias, *weight, *bias;
  T *y, *sum, *attended;
  Kept<float> kept;
  Dropout<float> dropout;
  int width;
  float eps;
};

// A few lanes a row: the sum, its statistics with the other blocks, the normalised row.
template <int kTiles, class T>
struct RowEnd {
  static constexpr int kRows = 16 * kTiles;
  const Rest<T>& rest;
  RowShare (&share)[kMostBlocks][kRows];
  float* const sums;  // [parts of the depth][kRows][sum_stride]
  const int sum_stride, parts;
  const int blocks, rank;
  const int first_column, columns;

  const int lanes = blockDim.x / kRows, lane = threadIdx.x % lanes, row = threadIdx.x / lanes;
  float* const own_sums = sums + row * sum_stride;

  // Calls f(c) for each first of eight columns that this lane has, counted from the block's first.
  template <class F>
  __device__ __forceinline__ void each(F f) const {
    for (int c = lane * 8; c < columns; c += lanes * 8) f(c);
  }

  // Row 0 is row `first_row` of all; `count` rows exist. shares_arrived counts the bytes of the other blocks' shares.
  __device__ __forceinline__ void run(int64_t first_row, int count, uint64_t* shares_arrived) const {
    const bool there = row < count;
    const int64_t at = (first_row + row) * rest.width + first_column;
    float total = 0, left = 0, squares = 0;
    each([&](int c) {
      float x[8], residual[8];
      widen(load_vector<8>(rest.proj_bias + first_column + c), x);
      for (int part = 0; part < parts; ++part) {
        const float* const from = own_sums + part * kRows * sum_stride + c;
        const auto low = load_vector<4>(from), high = load_vector<4>(from + 4);
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] += low.element[j], x[4 + j] += high.element[j];
      }
      rest.dropout.apply_aligned(at + c, x);
      if (there) {
        widen(load_vector<8>(rest.residual + at + c), residual);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] += residual[j];
        store_vector(rest.sum + at + c, narrow<T>(x));
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) own_sums[c + j] = x[j], total += x[j];
    });
    const float mean = columns == 0 ? 0.0f : sum_of_lanes(total, lanes) / static_cast<float>(columns);
    each([&](int c) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float off = own_sums[c + j] - mean;
        left += off, squares += off * off;
      }
    });
    left = sum_of_lanes(left, lanes), squares = sum_of_lanes(squares, lanes);
    const RowShare own{{mean, left}, {squares, static_cast<float>(columns)}};
    RowShare& place = share[rank][row];
    if (blocks == 1) {
      if (lane == 0) place = own;
      __syncwarp();
    } else {
      for (int b = lane; b < blocks; b += lanes) {
        const uint32_t barrier = remote_address(shares_arrived, b);
        store_remote_async(remote_address(&place.mean_and_rest, b), own.mean_and_rest, barrier);
        store_remote_async(remote_address(&place.squares_and_count, b), own.squares_and_count, barrier);
      }
      mbarrier_wait_cluster(shares_arrived, 0);  // then nobody reaches into this block: it may end
    }
    if (!there) return;
    const auto of_row = statistics_of(&share[0][row], kRows, blocks, rest.width, rest.eps);
    if (rank == 0 && lane == 0) rest.kept.keep(first_row + row, of_row);
    each([&](int c) {
      float weight[8], x[8];
      widen(load_vector<8>(rest.weight + first_column + c), weight);
      widen(load_vector<8>(rest.bias + first_column + c), x);
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] += of_row.normalize(own_sums[c + j]) * weight[j];
      store_vector(rest.y + at + c, narrow<T>(x));
    });
  }
};

}  // namespace kf::KF_BACKEND::attention_block
