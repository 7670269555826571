// Which query sees which key, and how a rung meets the log-sum-exp of a query that sees none.
#pragma once

#include <step2/attention/rows.h>

#include <cmath>
#include <cstdint>

#include "rungs.h"

namespace kf::KF_BACKEND::attention_backward {

using attention::KeyRange;
using attention::keys_of;
using attention::keys_seen;
using attention::kv_head_of;
using attention::row_of;
using attention::Rows;
using attention::rows_of;
using attention::Strides;

// Whether `query` sees `key`, of the keys that exist.
__device__ inline bool sees(const Args& a, const KeyRange& keys, int64_t query, int64_t key) {
  const KeyRange seen = keys_seen(a, keys, query);
  return key >= seen.begin && key < seen.end;
}

// The first query that sees `key`, if any does; all later ones do, too.
__device__ inline int64_t first_to_see(const Args& a, int64_t key) {
  return a.causal ? max(int64_t{0}, key - (a.k_length - a.q_length)) : 0;
}

// What is subtracted from a query's scores. Where lse is −∞ it sees nothing, or nothing but scores of −∞: its weights
// are 0, and exp(−∞ − ∞) is; exp(−∞ + ∞) would be NaN.
template <class C>
__device__ C subtracted(C lse) {
  return lse == C(-INFINITY) ? C(INFINITY) : lse;
}

}  // namespace kf::KF_BACKEND::attention_backward
