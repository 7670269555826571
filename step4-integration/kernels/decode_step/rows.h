// What a product reads: rows in shared memory, as T, zeros up to a whole chunk of the depth. What the kernel in front
// has written comes past the L1 cache (__ldcg): this one began before that was written.
#pragma once

#include <step2/reduce.h>

#include "place.h"
#include "weight_ring.h"

namespace kf::KF_BACKEND::decode_step {

// The part of the depth that a block has, and where its rows lie in shared memory.
template <class T>
struct Part {
  T* x;  // [batch, stride]
  int stride, first, last, batch;
};

__host__ __device__ constexpr int distance_of_rows(int depth) { return depth + 32; }  // the next row's banks are others

// ---- rows of a matrix [batch, depth]: a warp a row ----

template <class T>
struct Matrix {
  const T* x;
  int depth;

  __device__ void prepare() const {}

  template <int kRows>
  __device__ __forceinline__ void fill(const Part<T>& part) const {
    constexpr int kAtOnce = 4;  // loads of a lane in flight
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    for (int row = warp; row < part.batch; row += kWarps) {
      for (int k = part.first + lane * 8; k < part.last; k += kAtOnce * kWarpSize * 8) {
        uint4 vector[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int at = k + i * kWarpSize * 8;
          vector[i] = uint4{};
          if (at < min(part.last, depth)) vector[i] = __ldcg(reinterpret_cast<const uint4*>(x + row * depth + at));
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int at = k + i * kWarpSize * 8;
          if (at < part.last) *reinterpret_cast<uint4*>(part.x + row * part.stride + at - part.first) = vector[i];
        }
      }
    }
  }
};

// ---- rows that LayerNorm is applied to: all of the block's threads share each row, four columns a thread at a time
// ----

constexpr int kOfThread = 2;
constexpr int kMostWidth = kOfThread * 4 * kThreads;

template <class T>
struct Norm {
  const T *weight, *bias;
  float eps;
  int width;
  Vector<T, 4> of_weight[kOfThread] = {}, of_bias[kOfThread] = {};  // this thread's

  __device__ __forceinline__ static int column(int i) { return (i * kThreads + static_cast<int>(threadIdx.x)) * 4; }

  __device__ __forceinline__ void prepare() {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      if (column(i) >= width) continue;
      of_weight[i] = load_vector<4>(weight + column(i));
      of_bias[i] = load_vector<4>(bias + column(i));
    }
  }

  // load(row, i, column(i)) gives four neighbours. Sums are made in the same order whatever kRows is.
  template <int kRows, class Load>
  __device__ __forceinline__ void fill(const Part<T>& part, Load load) const {
    constexpr int kAtOnce = kRows < 8 ? kRows : 8;
    __shared__ float shared[2][kWarps][kAtOnce];
#pragma unroll 1
    for (int first_row = 0; first_row < (kRows <= 8 ? 1 : part.batch); first_row += kAtOnce) {
      float4 value[kAtOnce][kOfThread];
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
#pragma unroll
        for (int i = 0; i < kOfThread; ++i) {
          value[r][i] = float4{};
          if (first_row + r < part.batch && column(i) < width) value[r][i] = load(first_row + r, i, column(i));
        }
      }
      float mean[kAtOnce], factor[kAtOnce];
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        mean[r] = 0;
#pragma unroll
        for (int i = 0; i < kOfThread; ++i) {
          const float4& v = value[r][i];
          mean[r] += (v.x + v.y) + (v.z + v.w);
        }
      }
      sum_over_block(mean, shared[0]);
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        mean[r] /= static_cast<float>(width);
        factor[r] = 0;
#pragma unroll
        for (int i = 0; i < kOfThread; ++i) {
          if (column(i) >= width) continue;
          float4& v = value[r][i];
          v = {v.x - mean[r], v.y - mean[r], v.z - mean[r], v.w - mean[r]};
          factor[r] += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
        }
      }
      sum_over_block(factor, shared[1]);
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        factor[r] = rsqrtf(factor[r] / static_cast<float>(width) + eps);
#pragma unroll
        for (int i = 0; i < kOfThread; ++i) {
          if (first_row + r >= part.batch || column(i) < part.first || column(i) >= part.last) continue;
          const float centred[4] = {value[r][i].x, value[r][i].y, value[r][i].z, value[r][i].w};
          Vector<T, 4> rounded{};
          if (column(i) < width) {
            float out[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              out[j] = centred[j] * factor[r] * to_compute(of_weight[i].element[j]) + to_compute(of_bias[i].element[j]);
            }
            rounded = narrow<T>(out);
          }
          store_vector(part.x + (first_row + r) * part.stride + column(i) - part.first, rounded);
        }
      }
    }
  }

 private:
  // Each row's, over all threads.
  template <int kAtOnce>
  __device__ __forceinline__ static void sum_over_block(float (&of_row)[kAtOnce], float (&of_warp)[kWarps][kAtOnce]) {
    const int warp = threadIdx.x / kWarpSize;
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      of_row[r] = warp_sum(of_row[r]);
      if (threadIdx.x % kWarpSize == 0) of_warp[warp][r] = of_row[r];
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      of_row[r] = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) of_row[r] += of_warp[w][r];
    }
  }
};

// Of the residual stream, float [batch, width].
template <class T>
struct Normalised {
  const float* x;
  Norm<T> norm;

  __device__ void prepare() { norm.prepare(); }
  template <int kRows>
  __device__ __forceinline__ void fill(const Part<T>& part) const {
    norm.template fill<kRows>(part, [&](int row, int, int column) {
      return __ldcg(reinterpret_cast<const float4*>(x + row * norm.width + column));
    });
  }
};

// Of the embeddings, with which the residual stream begins: one block writes it.
template <class T>
struct Embedded {
  Args a;
  float* x;
  Norm<T> norm;

  __device__ void prepare() { norm.prepare(); }
  template <int kRows>
  __device__ __forceinline__ void fill(const Part<T>& part) const {
    norm.template fill<kRows>(part, [&](int row, int, int column) {
      const Tokens<T> tokens(a, row);
      float4 sum = {NAN, NAN, NAN, NAN};
      if (tokens.token != nullptr) {
        const Vector<T, 4> token = load_vector<4>(tokens.token + column);
        const Vector<T, 4> position = load_vector<4>(tokens.position + column);
        float of_token[4], of_position[4];
        widen(token, of_token);
        widen(position, of_position);
        sum = {of_token[0] + of_position[0], of_token[1] + of_position[1], of_token[2] + of_position[2],
               of_token[3] + of_position[3]};
      }
      if (blockIdx.x == 0 && blockIdx.y == 0) *reinterpret_cast<float4*>(x + row * norm.width + column) = sum;
      return sum;
    });
  }
};

}  // namespace kf::KF_BACKEND::decode_step
