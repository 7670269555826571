// The attention of attention_block's v5: 16 queries of some heads, by warps that share heads and keys.
//
// A warp takes tiles of 16 keys, straight into the registers that mma reads (step 2's attention_decode/fragments.h: no
// ldmatrix, no barrier, and a lane waits for its own copies only). Each has a softmax of its own, and leaves its part
// of a head where its keys were.
#pragma once

#include <step2/attention/tensor_cores.h>
#include <step2/attention_decode/ring.h>

namespace kf::KF_BACKEND::attention_block {

constexpr int kRows = 16;                     // of a block
constexpr int kHeadColumns = 64;              // of a head, the last ones zeros where head_dim is smaller
constexpr int kKeys = 16;                     // that a warp takes at once
constexpr int kStages = 2;                    // of a warp's ring: tiles that are used or in flight
constexpr int kRowStride = kHeadColumns + 8;  // of a head's rows in shared memory: ldmatrix finds eight in other banks

using KeyTile = attention_decode::Tile<kHeadColumns>;  // what a lane holds of 16 keys
using Part = attention_decode::RowPart<kHeadColumns>;
using Words = Vector<uint32_t, 4>;

// Where pieces of work are fewer than warps, 2, 4 or 8 warps share each: the logarithm of how many.
__host__ __device__ inline int log_warps_of_each(int pieces, int warps) {
  int log = 0;
  while ((pieces << (log + 1)) <= warps) ++log;
  return log;
}

// Where in a warp's 32 vectors this lane's lies: see attention_decode/ring.h.
__device__ __forceinline__ int key_slot(int i) { return attention_decode::Ring<kHeadColumns>::slot(i); }
__device__ __forceinline__ int weight_slot() { return key_slot(KeyTile::kVectors - 1); }

// A warp's shared memory: tiles of keys and values in flight; what it has found for a head; weights of the
// projection in flight, four vectors a lane for 16 of the depth.
union alignas(128) WarpMemory {
  static constexpr int kWeightStages = kStages * KeyTile::kVectors / 4;
  Words key[kStages][KeyTile::kVectors][kWarpSize];
  Part part[kRows];
  Words weight[kWeightStages][4][kWarpSize];
};

// What a warp knows of 16 queries of a head. Lane (g, t) = (lane / 4, lane % 4) holds rows g and g + 8.
template <class T>
struct WarpAttention {
  const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
  Words q[2][2] = {};  // [row g or g + 8][32 columns]: columns 8t to 8t + 7 of them
  // max: the greatest score so far, or not far below it; unscaled. sum: of this lane's keys.
  float max[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  float out[8][4] = {};  // [e][j]: row g + 8·(j / 2), column 8·(2t + j % 2) + e

  // The queries of a block: its first row in memory, and the distance of two. Rows beyond the last are like it.
  __device__ WarpAttention(const T* first, int64_t stride, int queries, int head_dim) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = i % 2 * 32 + t * 8;
      const T* const from = first + min(i / 2 * 8 + g, queries - 1) * stride + column;
      if (column < head_dim) q[i / 2][i % 2] = load_vector<4>(reinterpret_cast<const uint32_t*>(from));
    }
  }

  // Takes in the keys `first` to first + 15, counted from the first one that exists.
  __device__ __forceinline__ void take(const KeyTile& tile, const attention::BlockOfQueries& block, int first,
                                       float scale) {
    float score[2][4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int c = i / 2, h = i % 2 * 2;  // two products of 16 columns for each 32
      const uint32_t rows[4] = {q[0][c].element[h], q[1][c].element[h], q[0][c].element[h + 1], q[1][c].element[h + 1]};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        mma_m16n8k16<T>(score[n], rows, {tile.k(n, c).element[h], tile.k(n, c).element[h + 1]});
      }
    }
    if (first + kKeys > block.seen_by(0)) {  // the first query sees the least
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int n = i / 4, e = i % 4;
        if (first + n * 8 + t * 2 + e % 2 >= block.seen_by(g + e / 2 * 8)) score[n][e] = -INFINITY;
      }
    }

    uint32_t weight[4];
    float factor[2] = {1.0f, 1.0f};
    bool raised = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float highest = quad_max(greater_of(greater_of(score[0][2 * r], score[0][2 * r + 1]),
                                                greater_of(score[1][2 * r], score[1][2 * r + 1])));
      if ((highest - max[r]) * scale > kMaxLag) {  // not if nothing was seen yet and nothing is now: NaN
        factor[r] = exp2_approx((max[r] - highest) * scale);
        max[r] = highest;
        sum[r] *= factor[r];
        raised = true;
      }
      const float subtracted = max[r] == -INFINITY ? 0.0f : max[r] * scale;  // −inf − (−inf) would be NaN
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float low = exp2_approx(score[n][2 * r] * scale - subtracted);
        const float high = exp2_approx(score[n][2 * r + 1] * scale - subtracted);
        sum[r] += low + high;
        weight[n * 2 + r] = pack<T>(low, high);
      }
    }
    if (__any_sync(kFullWarp, raised)) {
#pragma unroll
      for (int i = 0; i < 32; ++i) out[i / 4][i % 4] *= factor[i / 2 % 2];
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      // The e-th column of two keys side by side: the lower halves of two registers, or the upper ones.
      const unsigned halves = e % 2 == 0 ? 0x5410 : 0x7632;
      const auto pair = [&](int i) {
        return __byte_perm(tile.v(i, 0).element[e / 2], tile.v(i + 1, 0).element[e / 2], halves);
      };
      mma_m16n8k16<T>(out[e], weight, {pair(0), pair(2)});
    }
  }

  __device__ __forceinline__ void leave(Part (&part)[kRows]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      Part& row = part[r * 8 + g];
      const float whole = quad_sum(sum[r]);
      if (t == 0) row.max = max[r], row.sum = whole;
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        const int j = 2 * r + v / 2, e = v % 2 * 4;
        store_vector(&row.out[(2 * t + v / 2) * 8 + e],
                     Vector<float, 4>{{out[e][j], out[e + 1][j], out[e + 2][j], out[e + 3][j]}});
      }
    }
  }
};

// All heads of a block: finish(head, row, first of 8 columns, their 8 values, ln Σ exp) is called for each 8 columns.
// Copies and products stand in the code once each: where a kernel runs for a few microseconds, loading its instructions
// is a part of them.
template <class T>
struct BlockAttention {
  const attention_decode::Args& a;
  WarpMemory* const memory;            // of each warp
  const int batch, first_head, heads;  // the block's first one, of its batch, and how many
  attention::BlockOfQueries block;     // of the first head

  const int warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const int tiles = (::max(block.seen_by(kRows - 1), 0) + kKeys - 1) / kKeys;

  // Asks for the keys `first` to first + 15. An empty group counts, too.
  __device__ __forceinline__ void issue_load(const attention_decode::Lane<T>& lane, int stage, int first) const {
    if (first < tiles * kKeys) {
      lane.template each<kHeadColumns>(
          a, int64_t{block.first_key} + first, 0, block.keys - first, [&](int i, const uint32_t* from, bool wanted) {
            Words* const to = &memory[warp].key[stage][i][key_slot(i)];
            cp_async_16(to, wanted ? from : static_cast<const uint32_t*>(a.k), wanted ? 16 : 0);
          });
    }
    cp_async_commit();
  }

  // Heads one for each warp at the most; where they are fewer, 2, 4 or 8 warps share a head, and each takes every
  // second, fourth, … tile of keys. before_first() is called once, before the first finish.
  template <class BeforeFirst, class Finish>
  __device__ __forceinline__ void run(BeforeFirst before_first, Finish finish) const {
    const float scale = static_cast<float>(a.scale * kLog2e);
#pragma unroll 1
    for (int first = 0; first < heads; first += warps) {
      const int now = min(warps, heads - first);
      const int log_splits = log_warps_of_each(now, warps);
      const int head = warp >> log_splits, split = warp - (head << log_splits);
      if (head < now) attend(first + head, split, 1 << log_splits, scale);
      __syncthreads();
      if (first == 0) before_first();
      put_together(first, now, log_splits, scale, finish);
      __syncthreads();
    }
  }

  // By one warp: every splits-th tile of the keys of a head.
  __device__ __forceinline__ void attend(int head, int split, int splits, float scale) const {
    const attention_decode::Lane<T> lane(a, batch, first_head + head);
    WarpAttention<T> found(static_cast<const T*>(a.q) + batch * a.q_stride.batch +
                               (first_head + head) * a.q_stride.head + block.first * a.q_stride.seq,
                           a.q_stride.seq, block.queries, static_cast<int>(a.head_dim));
    int stage = 0;
#pragma unroll 1
    for (int i = -kStages; i < tiles; ++i) {
      const int first = (split + i * splits) * kKeys;  // of the tile to be used; asked for is the one kStages further
      if (i >= 0) {
        if (first >= tiles * kKeys) break;
        cp_async_wait<kStages - 1>();
        KeyTile tile;
#pragma unroll
        for (int v = 0; v < KeyTile::kVectors; ++v) tile.vector[v] = memory[warp].key[stage][v][key_slot(v)];
        found.take(tile, block, first, scale);
      }
      issue_load(lane, stage, first + kStages * splits * kKeys);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    __syncwarp();  // the other lanes have read what the part is written over
    found.leave(memory[warp].part);
  }

  // The warps' parts of each head as one, always in the same order.
  template <class Finish>
  __device__ __forceinline__ void put_together(int first, int now, int log_splits, float scale, Finish finish) const {
    constexpr int kVectors = kHeadColumns / 8;  // of a row
    const int parts = min(1 << log_splits, tiles);
#pragma unroll 1
    for (int i = threadIdx.x; i < now * kRows * kVectors; i += blockDim.x) {
      const int head = i / (kRows * kVectors), row = i / kVectors % kRows, column = i % kVectors * 8;
      if (row >= block.queries) continue;
      const WarpMemory* const of_head = memory + (head << log_splits);
      float max = -INFINITY, sum = 0, out[8] = {};
#pragma unroll 2
      for (int p = 0; p < parts; ++p) {
        const Part& part = of_head[p].part[row];
        const auto low = load_vector<4>(part.out + column), high = load_vector<4>(part.out + column + 4);
        const float greater = greater_of(max, part.max);
        const float base = greater == -INFINITY ? 0.0f : greater;  // nothing seen: −inf − (−inf) would be NaN
        const float before = exp2_approx((max - base) * scale), factor = exp2_approx((part.max - base) * scale);
        max = greater;
        sum = sum * before + part.sum * factor;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          out[j] = out[j] * before + low.element[j] * factor;
          out[4 + j] = out[4 + j] * before + high.element[j] * factor;
        }
      }
      const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // 0: a query that sees no key
#pragma unroll
      for (float& x : out) x *= inverse;
      finish(first_head + first + head, row, column, out, max * static_cast<float>(a.scale) + logf(sum));
    }
  }
};

}  // namespace kf::KF_BACKEND::attention_block
