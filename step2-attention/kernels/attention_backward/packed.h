// Packed rows, for the rungs that take them: which queries see a key (step2/attention/documents.h).
//
// NaN      A tile that straddles documents has pairs of a query and a key that do not see each other. Their gradient is
//          0, and what a product multiplies it by is of the other document: 0 times NaN would be NaN there. So rows
//          that are not finite are found beforehand and made 0: keys by who owns them, queries by the producer. They
//          are not lost to their own document: a query that sees them has an lse or a Δ that is not finite, Δ's kernel
//          makes its lse NaN then, and NaN is each of its weights.
#pragma once

#include <step2/attention/documents.h>

#include "pairs.h"

namespace kf::KF_BACKEND::attention_backward {

using attention::Documents;
using attention::Seen;

__device__ inline bool is_finite(float x) { return fabsf(x) < INFINITY; }

// For rungs that ask of a packed row what others ask of any.
inline Args without_documents(Args a) {
  a.cu_seqlens = nullptr;
  return a;
}

// Calls f(std::true_type{}) if the row is packed, f(std::false_type{}) otherwise: kernels are compiled for each.
template <class F>
void with_packing(const Args& a, F&& f) {
  if (a.cu_seqlens != nullptr) return f(std::true_type{});
  f(std::false_type{});
}

}  // namespace kf::KF_BACKEND::attention_backward
