// The attention of attention_block's v5: 16 or 32 queries of one head after the other, by warps that share the keys.
//
// A warp takes every kWarps-th tile of 32 keys, straight into the registers that mma reads (step 2's
// attention_decode/fragments.h: no ldmatrix, no barrier, and a lane waits for its own copies only). Each has a softmax
// of its own. When a head is done, its parts lie where the last keys were, while the next head's are on their way.
#pragma once

#include <attention/tensor_cores.h>
#include <attention_decode/ring.h>

namespace kf::KF_BACKEND::attention_block {

constexpr int kHeadColumns = 64;  // of a head, the last ones zeros where head_dim is smaller
constexpr int kKeys = 32;         // that a warp takes at once
constexpr int kPlaces = 2;        // of a warp's ring: tiles that are used or on their way

using KeyTile = attention_decode::Tile<kHeadColumns>;  // what a lane holds of 16 keys
using Part = attention_decode::RowPart<kHeadColumns>;
using Words = Vector<uint32_t, 4>;

// A tile of keys and values on its way, and in its place, once it has been used, what a warp has found for a head.
template <int kRows>
union alignas(128) KeyPlace {
  Words word[kKeys / 16][KeyTile::kVectors][kWarpSize];
  Part part[kRows];

  __device__ KeyTile read(int half) const {
    KeyTile tile;
#pragma unroll
    for (int i = 0; i < KeyTile::kVectors; ++i) {
      tile.vector[i] = word[half][i][attention_decode::Ring<kHeadColumns>::slot(i)];
    }
    return tile;
  }
};

// What a warp knows of 16·kTiles queries of a head. Lane (g, t) = (lane / 4, lane % 4) holds rows g and g + 8 of each 16.
template <int kTiles, bool kDropout, class T>
struct WarpAttention {
  static constexpr int kRows = 16 * kTiles;
  const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
  Words q[kTiles][2][2] = {};  // [16 rows][row g or g + 8][32 columns]: columns 8t to 8t + 7 of them
  // max: the greatest score so far, or not far below it; unscaled. sum: of this lane's keys.
  float max[kTiles][2], sum[kTiles][2] = {};
  float out[kTiles][8][4] = {};  // [16 rows][e][j]: row g + 8·(j / 2), column 8·(2t + j % 2) + e

  // q_rows: the queries of the head in shared memory, `stride` elements from one to the next.
  __device__ WarpAttention(const T* q_rows, int stride, int head_dim) {
#pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) {
      const int tile = i / 4, r = i / 2 % 2, column = i % 2 * 32 + t * 8;
      max[tile][r] = -INFINITY;
      const T* const from = q_rows + (tile * 16 + r * 8 + g) * stride + column;
      if (column < head_dim) q[tile][r][i % 2] = load_vector<4>(reinterpret_cast<const uint32_t*>(from));
    }
  }

  // Takes in the keys `first` to first + 31, counted from the first one that exists.
  __device__ __forceinline__ void take(const KeyPlace<kRows>& keys, const attention::BlockOfQueries& block, int first,
                                       float scale, attention::Dropout& dropout) {
    float score[kTiles][kKeys / 8][4] = {};
#pragma unroll
    for (int half = 0; half < kKeys / 16; ++half) {
      const KeyTile key = keys.read(half);
#pragma unroll
      for (int i = 0; i < kTiles * 4; ++i) {
        const int tile = i / 4, c = i / 2 % 2, h = i % 2 * 2;  // two products of 16 columns for each 32
        const uint32_t rows[4] = {q[tile][0][c].element[h], q[tile][1][c].element[h], q[tile][0][c].element[h + 1],
                                  q[tile][1][c].element[h + 1]};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          mma_m16n8k16<T>(score[tile][2 * half + n], rows, {key.k(n, c).element[h], key.k(n, c).element[h + 1]});
        }
      }
    }
    if (first + kKeys > block.seen_by(0)) {  // the first query sees the least
#pragma unroll
      for (int i = 0; i < kTiles * kKeys / 2; ++i) {
        const int tile = i / (kKeys / 2), n = i / 4 % (kKeys / 8), e = i % 4;
        const int seen = block.seen_by(tile * 16 + g + e / 2 * 8);
        if (first + n * 8 + t * 2 + e % 2 >= seen) score[tile][n][e] = -INFINITY;
      }
    }

    uint32_t weight[kTiles][kKeys / 16][4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float subtracted[2], factor[2] = {1.0f, 1.0f};
      bool raised = false;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float highest = max[tile][r];
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
          highest = greater_of(highest, greater_of(score[tile][n][2 * r], score[tile][n][2 * r + 1]));
        }
        highest = quad_max(highest);
        if ((highest - max[tile][r]) * scale > kMaxLag) {  // not if nothing was seen yet and nothing is now: NaN
          factor[r] = exp2_approx((max[tile][r] - highest) * scale);
          max[tile][r] = highest;
          sum[tile][r] *= factor[r];
          raised = true;
        }
        subtracted[r] = max[tile][r] == -INFINITY ? 0.0f : max[tile][r] * scale;  // −inf − (−inf) would be NaN
      }
      uint64_t kept = 0;
      if constexpr (kDropout) {
        kept = dropout.kept<false, kKeys / 2>(block.head, block.first + tile * 16 + g, block.first_key + first + t * 2);
      }
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) {
        const int n = i / 2, r = i % 2;
        float low = exp2_approx(score[tile][n][2 * r] * scale - subtracted[r]);
        float high = exp2_approx(score[tile][n][2 * r + 1] * scale - subtracted[r]);
        sum[tile][r] += low + high;
        if constexpr (kDropout) {  // after the sum: it has all weights
          if ((kept >> (4 * n + 2 * r) & 1) == 0) low = 0.0f;
          if ((kept >> (4 * n + 2 * r + 1) & 1) == 0) high = 0.0f;
        }
        weight[tile][n / 2][n % 2 * 2 + r] = pack<T>(low, high);
      }
      if (__any_sync(kFullWarp, raised)) {
#pragma unroll
        for (int i = 0; i < 32; ++i) out[tile][i / 4][i % 4] *= factor[i / 2 % 2];
      }
    }

#pragma unroll
    for (int half = 0; half < kKeys / 16; ++half) {
      const KeyTile key = keys.read(half);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        // The e-th column of two keys side by side: the lower halves of two registers, or the upper ones.
        const unsigned halves = e % 2 == 0 ? 0x5410 : 0x7632;
        const uint32_t pairs[2] = {__byte_perm(key.v(0, 0).element[e / 2], key.v(1, 0).element[e / 2], halves),
                                   __byte_perm(key.v(2, 0).element[e / 2], key.v(3, 0).element[e / 2], halves)};
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) mma_m16n8k16<T>(out[tile][e], weight[tile][half], pairs);
      }
    }
  }

  __device__ void leave(Part (&part)[kRows]) const {
#pragma unroll
    for (int i = 0; i < kTiles * 2; ++i) {
      const int tile = i / 2, r = i % 2;
      Part& row = part[tile * 16 + r * 8 + g];
      const float whole = quad_sum(sum[tile][r]);
      if (t == 0) row.max = max[tile][r], row.sum = whole;
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        const int j = 2 * r + v / 2, e = v % 2 * 4;
        store_vector(&row.out[(2 * t + v / 2) * 8 + e],
                     Vector<float, 4>{{out[tile][e][j], out[tile][e + 1][j], out[tile][e + 2][j], out[tile][e + 3][j]}});
      }
    }
  }
};

// All heads of a block. rows: [kRows][stride] in shared memory; at a head's columns lie its queries, until
// finish(head, row, first of 8 columns, their 8 values, ln Σ exp) has been called for each row and each 8 columns.
template <int kTiles, bool kDropout, class T>
struct BlockAttention {
  static constexpr int kRows = 16 * kTiles;
  using Place = KeyPlace<kRows>;
  const attention_decode::Args& a;
  Place* const ring;  // [warps][kPlaces]
  const T* const rows;
  const int stride;
  const int first_head, heads;  // of the batch
  const int batch;
  attention::BlockOfQueries block;  // of the first of these heads

  const int warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const int tiles = (::max(block.seen_by(kRows - 1), 0) + kKeys - 1) / kKeys;

  // Of a head's tiles those of one warp.
  __device__ int tiles_of(int w) const { return tiles > w ? (tiles - w - 1) / warps + 1 : 0; }
  // Where warp w leaves its part of head h: in the place of its last tile.
  __device__ Place& last_place(int w, int h) const {
    return ring[w * kPlaces + ((h + 1) * tiles_of(w) - 1) % kPlaces];
  }

  // Asks for this warp's tile `index`, counted through all heads. An empty group counts, too.
  __device__ __forceinline__ void ask(int index) const {
    const int own = tiles_of(warp);
    if (index < own * heads) {
      const attention_decode::Lane<T> lane(a, batch, first_head + index / own);
      const int first = (warp + index % own * warps) * kKeys;
      Place& place = ring[warp * kPlaces + index % kPlaces];
#pragma unroll
      for (int half = 0; half < kKeys / 16; ++half) {
        const int key = first + half * 16;
        lane.template each<kHeadColumns>(
            a, int64_t{block.first_key} + key, 0, block.keys - key, [&](int i, const uint32_t* from, bool wanted) {
              Words* const to = &place.word[half][i][attention_decode::Ring<kHeadColumns>::slot(i)];
              cp_async_16(to, wanted ? from : static_cast<const uint32_t*>(a.k), wanted ? 16 : 0);
            });
      }
    }
    cp_async_commit();
  }

  // After the copies of the queries have been started and closed into a group.
  __device__ __forceinline__ void begin() const {
    for (int i = 0; i < kPlaces; ++i) ask(i);
  }

  template <class Finish>
  __device__ __forceinline__ void run(Finish finish) {
    const float scale = static_cast<float>(a.scale * kLog2e);
    const int own = tiles_of(warp), head_dim = static_cast<int>(a.head_dim);
    attention::Dropout dropout(a);
    cp_async_wait<kPlaces>();  // the queries
    __syncthreads();
    int index = 0;
    for (int h = 0; h < heads; ++h, ++block.head) {
      if (own > 0) {
        WarpAttention<kTiles, kDropout, T> found(rows + (first_head + h) * head_dim, stride, head_dim);
        for (int i = 0; i < own; ++i, ++index) {
          cp_async_wait<kPlaces - 1>();
          found.take(ring[warp * kPlaces + index % kPlaces], block, (warp + i * warps) * kKeys, scale, dropout);
          if (i + 1 < own) ask(index + kPlaces);
        }
        __syncwarp();  // the other lanes have read the place
        found.leave(last_place(warp, h).part);
      }
      __syncthreads();
      put_together(h, scale, kDropout ? dropout.scale() : 1.0f, finish);
      __syncthreads();
      if (own > 0) ask(index - 1 + kPlaces);
    }
  }

  // The warps' parts of head h as one, always in the same order.
  template <class Finish>
  __device__ __forceinline__ void put_together(int h, float scale, float keep_scale, Finish finish) const {
    const int with_tiles = min(warps, tiles);
    for (int i = threadIdx.x; i < kRows * (kHeadColumns / 8); i += blockDim.x) {
      const int row = i / (kHeadColumns / 8), column = i % (kHeadColumns / 8) * 8;
      float max = -INFINITY, sum = 0, out[8] = {};
      for (int w = 0; w < with_tiles; ++w) max = greater_of(max, last_place(w, h).part[row].max);
      const float base = max == -INFINITY ? 0.0f : max;  // nothing seen: −inf − (−inf) would be NaN
      for (int w = 0; w < with_tiles; ++w) {
        const Part& part = last_place(w, h).part[row];
        const float factor = exp2_approx((part.max - base) * scale);
        sum += part.sum * factor;
        const auto low = load_vector<4>(part.out + column), high = load_vector<4>(part.out + column + 4);
#pragma unroll
        for (int j = 0; j < 4; ++j) out[j] += low.element[j] * factor, out[4 + j] += high.element[j] * factor;
      }
      const float inverse = sum == 0.0f ? 0.0f : keep_scale / sum;  // 0: a query that sees no key
#pragma unroll
      for (float& x : out) x *= inverse;
      finish(first_head + h, row, column, out, max * static_cast<float>(a.scale) + logf(sum));
    }
  }
};

}  // namespace kf::KF_BACKEND::attention_block
