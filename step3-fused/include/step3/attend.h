// Attention of one head for a tile of query rows, computed by a block in its shared memory.
//
// Both rungs of the fused ops call this: v1 has a block for each head and copies its result out to global memory; v2
// has one block go through all heads and keeps their results side by side, for what comes next.
#pragma once

#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/vector.h>
#include <step2/attention/dropout.h>
#include <step2/attention/rows.h>
#include <step2/online_softmax.h>
#include <step2/reduce.h>
#include <step3/attention.h>

namespace kf::KF_BACKEND {

constexpr int kAttendThreads = 256;
constexpr int kAttendWarps = kAttendThreads / kWarpSize;
constexpr int kKeys = kWarpSize;  // keys in a tile: a lane each

template <class C>
constexpr int kPack = 16 / sizeof(C);  // values of C in one 128-bit access

// Elements from a row of a tile to the next: head_dim filled up with zeros to a multiple of 64, since a lane owns the
// columns d and d + 32; and 4 more, so that 8 lanes that read 128 bits of 8 neighbouring rows touch 32 different banks.
__host__ __device__ constexpr int64_t tile_stride(int64_t head_dim) { return ceil_div(head_dim, 64) * 64 + 4; }

// What attend_tile needs in shared memory, in values: queries rows × stride, keys and values 32 × stride each, weights
// rows × 32.
__host__ __device__ constexpr int64_t attend_values(int64_t rows, int64_t head_dim) {
  return (rows + 2 * kKeys) * tile_stride(head_dim) + rows * kKeys;
}

// Copies rows of one head into a tile, times `factor`. What lies outside, in rows or columns, becomes 0.
template <class T, class C>
__device__ void load_tile(const T* from, int64_t row_stride, int64_t rows_left, int tile_rows, int head_dim, C factor,
                          C* tile) {
  const int stride = static_cast<int>(tile_stride(head_dim));
  for (int r = threadIdx.x / kWarpSize; r < tile_rows; r += kAttendWarps) {  // a warp a row: coalesced
    for (int d = threadIdx.x % kWarpSize; d < stride; d += kWarpSize) {
      const bool inside = r < rows_left && d < head_dim;
      tile[r * stride + d] = inside ? factor * to_compute(from[r * row_stride + d]) : C(0);
    }
  }
}

// out[r · out_stride + d] = attention of query first_row + r in head `head`, for r < kRows, d < head_dim; and its
// log-sum-exp to a.lse, if wanted. Rows past the last query get a value that nobody reads. Each warp computes kRows/8
// rows and writes only those; a barrier must stand between this and a use of other warps' rows. All 256 threads call
// it.
template <int kRows, class T, class C = compute_t<T>>
__device__ void attend_tile(const Attention& a, int64_t batch, int64_t head, int64_t first_row, C* memory, C* out,
                            int64_t out_stride) {
  constexpr int kRowsOfWarp = kRows < kAttendWarps ? 1 : kRows / kAttendWarps;
  const int head_dim = static_cast<int>(a.head_dim);
  const int stride = static_cast<int>(tile_stride(head_dim));
  const int lane = threadIdx.x % kWarpSize;
  const int row = static_cast<int>(threadIdx.x) / kWarpSize * kRowsOfWarp;  // the warp's first row in the tile
  const bool has_rows = row < kRows;                                        // fewer rows than warps: some only load

  const auto base = [&](const TensorRef& x) {
    return static_cast<const T*>(x.data) + batch * x.batch_stride + head * x.head_stride;
  };
  C* queries = memory;
  C* keys = queries + kRows * stride;
  C* values = keys + kKeys * stride;
  C* weights = values + kKeys * stride + row * kKeys;  // the warp's own

  const int64_t head_of_all = batch * a.heads + head;
  const attention::KeyRange exist = attention::keys_of(a, head_of_all);
  const attention::KeyRange seen =
      attention::keys_seen(a, exist, min(first_row + kRows, a.q_length) - 1);  // by the last query

  __syncthreads();  // the tiles of the head before have been read
  load_tile(base(a.q) + first_row * a.q.seq_stride, a.q.seq_stride, a.q_length - first_row, kRows, head_dim,
            static_cast<C>(a.scale), queries);

  OnlineSoftmax<C> softmax[kRowsOfWarp];
  if (has_rows) {
    for (int p = 0; p < kRowsOfWarp; ++p) {
      for (int d = lane; d < head_dim; d += kWarpSize) out[(row + p) * out_stride + d] = 0;
    }
  }

  for (int64_t first_key = seen.begin; first_key < seen.end; first_key += kKeys) {
    if (first_key > seen.begin) __syncthreads();  // the tiles before have been read
    load_tile(base(a.k) + first_key * a.k.seq_stride, a.k.seq_stride, exist.end - first_key, kKeys, head_dim, C(1),
              keys);
    load_tile(base(a.v) + first_key * a.v.seq_stride, a.v.seq_stride, exist.end - first_key, kKeys, head_dim, C(1),
              values);
    __syncthreads();
    if (!has_rows) continue;

    // Scores: a lane a key. A query is read by all lanes at once, the keys by 128 bits a lane.
    C score[kRowsOfWarp] = {};
#pragma unroll 2
    for (int d = 0; d < head_dim; d += kPack<C>) {
      const auto key = load_vector<kPack<C>>(keys + lane * stride + d);
#pragma unroll
      for (int p = 0; p < kRowsOfWarp; ++p) {
        const auto query = load_vector<kPack<C>>(queries + (row + p) * stride + d);
#pragma unroll
        for (int i = 0; i < kPack<C>; ++i) score[p] += query.element[i] * key.element[i];
      }
    }

    // Softmax as far as it is known. Lanes agree on the maximum; each keeps the sum of its own weights until the end.
    C factor[kRowsOfWarp];
#pragma unroll
    for (int p = 0; p < kRowsOfWarp; ++p) {
      const int64_t query = first_row + row + p, key = first_key + lane;
      if (key >= attention::keys_seen(a, exist, query).end) score[p] = -INFINITY;
      factor[p] = softmax[p].raise(warp_max(score[p]));
      const C weight = softmax[p].weight(score[p]);
      softmax[p].sum += weight;  // of all weights, dropped ones too
      weights[p * kKeys + lane] = weight;
    }
    if (a.threshold != 0) {
      const attention::AttentionDropout dropout(a);
#pragma unroll 1  // two calls of Philox side by side would take too many registers
      for (int p = 0; p < kRowsOfWarp; ++p) {
        weights[p * kKeys + lane] *= dropout.factor<C>(head_of_all, first_row + row + p, first_key + lane);
      }
    }
    __syncwarp();

    // Output: a lane a column, two at a time. Weights are read by all lanes at once.
    for (int d = lane; d < head_dim; d += 2 * kWarpSize) {
      C sum[kRowsOfWarp][2] = {};
#pragma unroll 2
      for (int j = 0; j < kKeys; j += kPack<C>) {
        Vector<C, kPack<C>> weight[kRowsOfWarp];
#pragma unroll
        for (int p = 0; p < kRowsOfWarp; ++p) weight[p] = load_vector<kPack<C>>(weights + p * kKeys + j);
#pragma unroll
        for (int i = 0; i < kPack<C>; ++i) {
          const C left = values[(j + i) * stride + d];
          const C right = values[(j + i) * stride + d + kWarpSize];
#pragma unroll
          for (int p = 0; p < kRowsOfWarp; ++p) {
            sum[p][0] += weight[p].element[i] * left;
            sum[p][1] += weight[p].element[i] * right;
          }
        }
      }
#pragma unroll
      for (int p = 0; p < kRowsOfWarp; ++p) {
        C* to = out + (row + p) * out_stride + d;
        to[0] = to[0] * factor[p] + sum[p][0];
        if (d + kWarpSize < head_dim) to[kWarpSize] = to[kWarpSize] * factor[p] + sum[p][1];
      }
    }
  }

  if (!has_rows) return;
#pragma unroll
  for (int p = 0; p < kRowsOfWarp; ++p) {
    const C sum = softmax[p].sum = warp_sum(softmax[p].sum);
    const C inverse = sum == C(0) ? C(0) : C(1) / sum;  // a query that sees no key
    const int64_t query = first_row + row + p;
    if (a.lse != nullptr && lane == 0 && query < a.q_length) {
      static_cast<C*>(a.lse)[head_of_all * a.q_length + query] = softmax[p].log_sum_exp();
    }
    for (int d = lane; d < head_dim; d += kWarpSize) out[(row + p) * out_stride + d] *= inverse;
  }
}

}  // namespace kf::KF_BACKEND
