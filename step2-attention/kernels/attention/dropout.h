// Dropout of the weights: which of them are kept, in every rung of attention and of its gradient the same ones.
//
// One call of Philox (step1/philox.h) gives eight numbers of 16 bits, for queries i and i + 8 and keys j, j + 8, j + 16
// and j + 24 of a piece of 16 × 32 weights: those that a lane holds of it after mma or wgmma, where queries are owned
// and tiles begin with pieces. Then no number is computed twice, and none passed from lane to lane.
#pragma once

#include <kf/launch.h>
#include <step1/philox.h>

#include <cstdint>
#include <string>

#include "rungs.h"

namespace kf::KF_BACKEND::attention {

struct Dropout {
  DropoutState state;
  uint32_t threshold;
  int64_t row_pieces, column_pieces;  // of a head's scores: 16 queries each, 32 keys each

  __device__ explicit Dropout(const Args& a)
      : state{a.rng_state, a.seed, a.offset},
        threshold(a.threshold),
        row_pieces(ceil_div(a.q_length, 16)),
        column_pieces(ceil_div(a.k_length, 32)) {
    if (threshold != 0) state.read();
  }

  // What a weight is multiplied by: 0, or one over the part that is kept. `head` counts through all batches.
  template <class C>
  __device__ C factor(int64_t head, int64_t query, int64_t key) const {
    if (threshold == 0) return C(1);
    const int64_t piece = (head * row_pieces + query / 16) * column_pieces + key / 32;
    const Eight numbers = state.eight(piece * 64 + query % 8 * 8 + key % 8);
    return numbers.number(static_cast<int>(query / 8 % 2 + key / 8 % 4 * 2)) >= threshold ? keep_scale<C>(threshold)
                                                                                          : C(0);
  }
};

// Why a rung that computes no dropout cannot do this; "" if it can.
inline std::string without_dropout(const Args& a) { return a.threshold == 0 ? "" : "computes no dropout"; }

}  // namespace kf::KF_BACKEND::attention
