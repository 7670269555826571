// The normalisation of attention_block's v4: by warps that have nothing else to do, a few rows at a time.
#pragma once

#include <step1/vector.h>
#include <step2/reduce.h>
#include <step2/warpgroup.h>

#include "order.h"

namespace kf::KF_BACKEND::attention_block {

template <class T>
struct Norm {
  const T *weight, *bias, *sum;
  T* y;
  float *mean, *rstd;  // of each row, or null
  int width, rows;     // rows of a batch
  float eps;
};

// kVectors: of 8 numbers, that a lane has of a row. The rows of a tile are all in flight before the first is needed.
template <int kVectors, class T>
struct Normalize {
  static constexpr int kRows = kVectors <= 4 ? 4 : 2;
  static constexpr int kParts = kGroupRows / kRows;  // of a group
  const Norm<T>& norm;
  const int lane = threadIdx.x % kWarpSize;

  __device__ int column(int i) const { return (lane + i * kWarpSize) * 8; }
  __device__ bool has(int i) const { return column(i) < norm.width; }

  // kRows rows from `first` on, of which `count` exist.
  __device__ void rows(int64_t first, int count) const {
    uint4 x[kRows][kVectors];  // as they lie in memory: as floats they would take twice the registers
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        x[r][i] = make_uint4(0, 0, 0, 0);
        if (r < count && has(i)) {
          x[r][i] = __ldcg(reinterpret_cast<const uint4*>(norm.sum + (first + r) * norm.width + column(i)));
        }
      }
    }
    float mean[kRows] = {}, rstd[kRows] = {};
    const auto each = [&](auto f) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (!has(i)) continue;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float value[8];
          widen(reinterpret_cast<const Vector<T, 8>&>(x[r][i]), value);
#pragma unroll
          for (float number : value) f(r, number);
        }
      }
    };
    each([&](int r, float number) { mean[r] += number; });
#pragma unroll
    for (int r = 0; r < kRows; ++r) mean[r] = warp_sum(mean[r]) / norm.width;
    each([&](int r, float number) { rstd[r] += (number - mean[r]) * (number - mean[r]); });
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rstd[r] = rsqrtf(warp_sum(rstd[r]) / norm.width + norm.eps);
      if (norm.mean != nullptr && lane == 0 && r < count)
        norm.mean[first + r] = mean[r], norm.rstd[first + r] = rstd[r];
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (!has(i)) continue;
      float weight[8], bias[8];
      widen(load_vector<8>(norm.weight + column(i)), weight);
      widen(load_vector<8>(norm.bias + column(i)), bias);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r >= count) continue;
        float value[8];
        widen(reinterpret_cast<const Vector<T, 8>&>(x[r][i]), value);
#pragma unroll
        for (int j = 0; j < 8; ++j) value[j] = (value[j] - mean[r]) * rstd[r] * weight[j] + bias[j];
        store_vector(norm.y + (first + r) * norm.width + column(i), narrow<T>(value));
      }
    }
  }

  // By a warp: until all rows are done.
  __device__ void run(const Order& order, const Counters& counters) const {
    const auto count = static_cast<unsigned>(order.all_groups() * kParts);
    const auto draw = [&] { return lane == 0 ? atomicAdd(counters.drawn_rows, 1u) : 0; };
    for (unsigned next = draw();;) {
      const unsigned drawn = __shfl_sync(kFullWarp, next, 0);
      if (drawn >= count) break;
      next = draw();  // its answer takes time
      const Group group = order.group(static_cast<int>(drawn) / kParts);
      const int row = group.group * kGroupRows + static_cast<int>(drawn) % kParts * kRows;
      if (row >= norm.rows) continue;
      if (lane == 0) wait_for_counter(counters.projected + order.number_of(group), order.columns);
      __syncwarp();
      rows(int64_t{group.batch} * norm.rows + row, min(kRows, norm.rows - row));
    }
  }
};

}  // namespace kf::KF_BACKEND::attention_block
