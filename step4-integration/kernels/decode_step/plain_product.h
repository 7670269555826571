// The products of v1_launches: what they read, what becomes of their sums, and the loop between the two.
#pragma once

#include <step1/gelu.h>
#include <step2/reduce.h>

#include "place.h"

namespace kf::KF_BACKEND::decode_step {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

// ---- what a product reads ----

template <class C>
struct PlainRows {
  const C* x;  // [batch, depth]
  struct Row {
    const C* x;
    __device__ C at(int64_t k) const { return x[k]; }
  };
  __device__ Row row(int64_t row, int64_t depth) const { return {x + row * depth}; }
};

template <class T>
struct NormalisedRows {
  using C = compute_t<T>;
  const C* x;
  const T *weight, *bias;
  C eps;
  struct Row {
    const C* x;
    const T *weight, *bias;
    C mean, factor;
    __device__ C at(int64_t k) const { return (x[k] - mean) * factor * to_compute(weight[k]) + to_compute(bias[k]); }
  };
  // All threads of the block call it.
  __device__ Row row(int64_t row, int64_t depth) const {
    __shared__ C shared[kWarpSize];
    const C* of_row = x + row * depth;
    C sum = 0, squares = 0;
    for (int64_t k = threadIdx.x; k < depth; k += kThreads) sum += of_row[k];
    const C mean = block_sum(sum, shared) / static_cast<C>(depth);
    for (int64_t k = threadIdx.x; k < depth; k += kThreads) squares += (of_row[k] - mean) * (of_row[k] - mean);
    const C variance = block_sum(squares, shared) / static_cast<C>(depth);
    return {of_row, weight, bias, mean, C(1) / sqrt(variance + eps)};
  }
};

// ---- what is done with its sums ----

// q to scratch, k and v to their slot.
template <class T>
struct QkvToCache {
  Args a;
  compute_t<T>* q;
  int layer;
  __device__ void store(int row, int64_t column, compute_t<T> sum) const {
    const int64_t part = column / a.width, within = column % a.width;
    if (part == 0) {
      q[row * a.width + within] = sum;
      return;
    }
    const int head = static_cast<int>(within / a.head_dim), slot = Place(a, row).slot;
    if (slot < 0) return;
    T* to = part == 1 ? in_cache<T>(a.k_cache, a.k_stride, layer, row, head, slot)
                      : in_cache<T>(a.v_cache, a.v_stride, layer, row, head, slot);
    to[within % a.head_dim] = from_compute<T>(sum);
  }
};

template <class C>
struct AddToX {
  C* x;
  int64_t width;
  __device__ void store(int row, int64_t column, C sum) const { x[row * width + column] += sum; }
};

template <class C>
struct GeluOf {
  C* hidden;
  int64_t width;
  bool tanh;
  __device__ void store(int row, int64_t column, C sum) const {
    hidden[row * width + column] = tanh ? gelu_of<true>(sum) : gelu_of<false>(sum);
  }
};

// x · weight [depth, width] + bias. Neighbouring threads have neighbouring columns; each warp has its part of the
// depth.
template <class T, class Source, class Epilogue>
__global__ void __launch_bounds__(kThreads)
    product_kernel(Source source, const T* weight, const T* bias, int64_t depth, int64_t width, Epilogue epilogue) {
  using C = compute_t<T>;
  __shared__ C sums[kWarps][kWarpSize];
  const int row = blockIdx.y, lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t column = int64_t{blockIdx.x} * kWarpSize + lane;
  const auto x = source.row(row, depth);
  C sum = 0;
  for (int64_t k = warp; k < depth && column < width; k += kWarps)
    sum += x.at(k) * to_compute(weight[k * width + column]);
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || column >= width) return;
  C all = to_compute(bias[column]);
  for (int w = 0; w < kWarps; ++w) all += sums[w][lane];
  epilogue.store(row, column, all);
}

}  // namespace kf::KF_BACKEND::decode_step
