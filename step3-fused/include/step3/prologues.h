// What may happen to a product's first factor on its way to the tensor cores: in registers, after it was loaded. So it
// happens anew for each tile of columns.
//
// A lane holds of 16 rows and 16 of the depth, as mma.sync and wgmma take operand a (step2/mma.h), the rows g and g + 8
// and of the depth 2t, 2t + 1, 2t + 8 and 2t + 9, g = lane / 4, t = lane % 4.
#pragma once

#include <step1/gelu.h>
#include <step1/vector.h>
#include <step2/mma.h>
#include <step2/reduce.h>

#include <cstdint>

namespace kf::KF_BACKEND {

// Nothing happens.
struct NoPrologue {
  template <int kTiles>
  struct Own {
    __device__ Own(const NoPrologue&, int64_t, int64_t) {}
  };
};

// gelu(a).
template <class T, bool kTanh>
struct GeluPrologue {
  template <int kTiles>
  struct Own {
    __device__ Own(const GeluPrologue&, int64_t, int64_t) {}

    __device__ __forceinline__ void apply(uint32_t (&a)[4], int, int64_t) const {
#pragma unroll
      for (uint32_t& pair : a) {
        float value[2];
        widen(reinterpret_cast<const Vector<T, 2>&>(pair), value);
        pair = pack<T>(fast_gelu<T, kTanh>(value[0]), fast_gelu<T, kTanh>(value[1]));
      }
    }
  };
};

// (a − mean) · rstd · weight + bias, LayerNorm of rows whose statistics are known.
template <class T>
struct NormalizePrologue {
  const float* statistics;  // [rows][4]: mean, what the mean lacks (step3/statistics.h), rstd, nothing
  const T *weight, *bias;   // [depth]
  int64_t depth;

  // For kTiles tiles of 16 rows, of which this lane has two each.
  template <int kTiles>
  struct Own {
    const T *weight, *bias;
    int64_t depth;
    float mean[kTiles][2], rest[kTiles][2], rstd[kTiles][2];

    // first: the first row of the warp's tiles.
    __device__ Own(const NormalizePrologue& p, int64_t first, int64_t rows)
        : weight(p.weight), bias(p.bias), depth(p.depth) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int64_t row = first + 16 * i + 8 * half + threadIdx.x % kWarpSize / 4;
          const auto s = row < rows ? load_vector<4>(p.statistics + row * 4) : Vector<float, 4>{};
          mean[i][half] = s.element[0], rest[i][half] = s.element[1], rstd[i][half] = s.element[2];
        }
      }
    }

    // k: of the lane's first element. Beyond the depth b's rows are 0.
    __device__ __forceinline__ void apply(uint32_t (&a)[4], int tile, int64_t k) const {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const int64_t at = k + pair / 2 * 8;
        float value[2], w[2] = {}, b[2] = {};
        widen(reinterpret_cast<const Vector<T, 2>&>(a[pair]), value);
        if (at < depth) {  // the depth is even
          widen(load_vector<2>(weight + at), w);
          widen(load_vector<2>(bias + at), b);
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float normalised = (value[j] - mean[tile][pair % 2] - rest[tile][pair % 2]) * rstd[tile][pair % 2];
          value[j] = at < depth ? normalised * w[j] + b[j] : 0.0f;  // there it may be infinite, and infinity · 0 is NaN
        }
        a[pair] = pack<T>(value[0], value[1]);
      }
    }
  };
};

}  // namespace kf::KF_BACKEND
