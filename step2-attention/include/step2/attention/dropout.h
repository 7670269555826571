// Dropout of the weights: which of them are kept, in every rung of attention and of its gradient the same ones.
//
// One call of Philox (step1/philox.h) gives eight numbers of 16 bits, for queries i and i + 8 and keys j, j + 8, j + 16
// and j + 24 of a piece of 16 × 32 weights: those that a lane holds of it after mma or wgmma, where queries are owned
// and tiles begin with pieces. Then no number is computed twice, and none passed from lane to lane.
#pragma once

#include <kf/launch.h>
#include <step1/philox.h>
#include <step2/attention/rows.h>

#include <cstdint>
#include <string>
#include <type_traits>

namespace kf::KF_BACKEND::attention {

struct AttentionDropout {
  PhiloxState philox_state;
  uint32_t threshold;
  int64_t row_pieces, column_pieces;  // of a head's scores: 16 queries each, 32 keys each

  template <class Args>  // this op's, or another's that has the same members
  __device__ explicit AttentionDropout(const Args& a)
      : philox_state{a.rng_state, a.seed, a.offset},
        threshold(a.threshold),
        row_pieces(ceil_div(a.q_length, 16)),
        column_pieces(ceil_div(a.k_length, 32)) {
    if (threshold != 0) philox_state.read();
  }

  __device__ int64_t piece_of(int64_t head, int64_t query, int64_t key) const {
    return (head * row_pieces + query / 16) * column_pieces + key / 32;
  }

  // What a weight is multiplied by: 0, or one over the part that is kept. `head` counts through all batches.
  template <class C>
  __device__ C factor(int64_t head, int64_t query, int64_t key) const {
    if (threshold == 0) return C(1);
    const Eight numbers = philox_state.eight(piece_of(head, query, key) * 64 + query % 8 * 8 + key % 8);
    return numbers.number(static_cast<int>(query / 8 % 2 + key / 8 % 4 * 2)) >= threshold ? keep_scale<C>(threshold)
                                                                                          : C(0);
  }

  // Which of the N weights that a lane holds after mma or wgmma are kept: bit i is weight i's, of own row
  // `row` + 8·(i / 2 % 2), and of `column` + 8·(i / 4) + i % 2 of a tile; `column` is the lane's first. The rows are of
  // queries and the columns of keys, or the other way round. A warp's 16 rows begin at a multiple of 16.
  template <bool kOwnsKeys, int N>
  __device__ __forceinline__ uint64_t kept(int64_t head, int64_t row, int64_t column) {
    const int in_eight = static_cast<int>(threadIdx.x % 4) * 2;
    constexpr int kPiece = kOwnsKeys ? 16 : 32;  // columns of a piece
    uint64_t bits = 0;
    if ((column - in_eight) % kPiece != 0) {  // after padding tiles begin anywhere: eight times as many calls
#pragma unroll 1
      for (int i = 0; i < N; ++i) {
        const int64_t own = row + i / 2 % 2 * 8, other = column + i / 4 * 8 + i % 2;
        const bool keep = factor<float>(head, kOwnsKeys ? other : own, kOwnsKeys ? own : other) != 0;
        bits |= uint64_t{keep} << i;
      }
      return bits;
    }
#pragma unroll
    for (int i = 0; i < N; i += kPiece / 2) {
      const int64_t other = column + i * 2;  // half of the elements of eight columns are of the other row
      const int64_t query = kOwnsKeys ? other : row, key = kOwnsKeys ? row : other;
      const int64_t piece = piece_of(head, query, key);
      forget_round_keys(philox_state.seed);
      for (int e = 0; e < 2; ++e) {
        const int in_piece = static_cast<int>(query % 8 * 8 + key % 8) + (kOwnsKeys ? 8 * e : e);
        Eight numbers = philox_state.eight(piece * 64 + in_piece);
        if (kOwnsKeys && key % 32 >= 16) numbers.bits = make_uint4(numbers.bits.z, numbers.bits.w, 0, 0);
#pragma unroll
        for (int j = 0; j < kPiece / 4; ++j) {  // number j is of query 8·(j % 2) and of key 8·(j / 2) further
          const int r = kOwnsKeys ? j / 2 : j % 2, n = kOwnsKeys ? j % 2 : j / 2;
          bits |= uint64_t{numbers.number(j) >= threshold} << (i + 4 * n + 2 * r + e);
        }
      }
    }
    return bits;
  }

  // Makes weights that are dropped 0; those that are kept stay as they are, and want to be multiplied by `scale`.
  template <int N>
  __device__ __forceinline__ static void drop(float (&weight)[N], uint64_t kept) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if ((kept >> i & 1) == 0) weight[i] = 0.0f;
    }
  }
  __device__ float scale() const { return keep_scale<float>(threshold); }
};

// Calls f(std::true_type{}) if any weight may be dropped, f(std::false_type{}) otherwise: kernels are compiled for
// each, since dropout takes registers.
template <class F>
void with_dropout(const Args& a, F&& f) {
  if (a.threshold != 0) return f(std::true_type{});
  f(std::false_type{});
}

}  // namespace kf::KF_BACKEND::attention
