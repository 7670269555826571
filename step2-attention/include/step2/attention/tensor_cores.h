// What the rungs on tensor cores share: what they ask of their tensors, and which keys a block's queries see.
#pragma once

#include <kf/launch.h>
#include <kf/numeric.h>
#include <step2/attention/dropout.h>
#include <step2/online_softmax.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>

namespace kf::KF_BACKEND::attention {

// Rows at multiples of 16 bytes, as attention_host.cpp hands them over.
inline bool has_aligned_rows(const Args& a, const void* first, const Strides& stride, int64_t heads, int64_t length) {
  const auto whole = [](int64_t size, int64_t distance) { return size <= 1 || (distance >= 0 && distance % 8 == 0); };
  return reinterpret_cast<uintptr_t>(first) % 16 == 0 && whole(a.batch, stride.batch) && whole(heads, stride.head) &&
         whole(length, stride.seq);
}

// For rungs that multiply scores by scale·log₂e in float32: 0 times a hidden score, −inf, would be NaN.
inline bool is_above_0(double scale) {
  const auto factor = static_cast<float>(scale * kLog2e);
  return factor > 0 && std::isfinite(factor);
}

// Why a rung of which a block owns `queries` queries cannot do this; "" if it can.
inline std::string on_tensor_cores(const Args& a, int64_t queries) {
  if (a.dtype == DType::kFloat32) return "takes float16 or bfloat16, got float32";
  if (a.dtype == DType::kFloat64) return "takes float16 or bfloat16, got float64";
  if (a.head_dim % 8 != 0 || a.head_dim > 128) {
    return "takes head_dim that is a multiple of 8 up to 128, got " + std::to_string(a.head_dim);
  }
  if (!has_aligned_rows(a, a.q, a.q_stride, a.heads, a.q_length) ||
      !has_aligned_rows(a, a.k, a.k_stride, a.kv_heads, a.k_length) ||
      !has_aligned_rows(a, a.v, a.v_stride, a.kv_heads, a.k_length) ||
      !has_aligned_rows(a, a.out, a.out_stride, a.heads, a.q_length)) {
    return "takes rows that begin at multiples of 16 bytes";
  }
  const int64_t blocks = a.batch * a.heads * ceil_div(a.q_length, queries);
  if (blocks > INT32_MAX) {
    return "takes at most 2147483647 blocks of " + std::to_string(queries) + " queries, got " + std::to_string(blocks);
  }
  if (a.k_length > 1 << 30) return "takes at most 1073741824 keys, got " + std::to_string(a.k_length);
  if (a.q_length > 1 << 30) return "takes at most 1073741824 queries, got " + std::to_string(a.q_length);
  if (compute_capability() < 80) return "needs a GPU of compute capability 8.0 or newer";
  return "";
}

// For rungs without packed rows: why not, or "".
inline std::string takes_no_documents(const Args& a) {
  return a.cu_seqlens == nullptr ? "" : "takes no packed rows (`cu_seqlens`)";
}

// Calls f(type, columns, drops), of which a kernel is compiled for each: the half type; the columns that a tile has,
// 32, 64, 96 or 128, those beyond head_dim being zeros; and whether any weight may be dropped.
template <class F>
void with_columns(const Args& a, F&& f) {
  with_half_type(a.dtype, [&](auto type) {
    with_dropout(a, [&](auto drops) {
      if (a.head_dim <= 32) return f(type, std::integral_constant<int, 32>{}, drops);
      if (a.head_dim <= 64) return f(type, std::integral_constant<int, 64>{}, drops);
      if (a.head_dim <= 96) return f(type, std::integral_constant<int, 96>{}, drops);
      f(type, std::integral_constant<int, 128>{}, drops);
    });
  });
}

// As with_columns, where a tile has 64 columns, or 128.
template <class F>
void with_slices(const Args& a, F&& f) {
  with_half_type(a.dtype, [&](auto type) {
    with_dropout(a, [&](auto drops) {
      if (a.head_dim <= 64) return f(type, std::integral_constant<int, 64>{}, drops);
      f(type, std::integral_constant<int, 128>{}, drops);
    });
  });
}

// A block's queries, of which each sees one key more than the one before if the mask is causal. All in 32 bits, which
// saves registers: keys are counted from the first one that exists.
struct BlockOfQueries {
  static constexpr bool kPacked = false;
  int head;       // of all batches
  int first;      // its first query
  int first_key;  // that exists
  int queries;    // no more than the last block has
  int keys;       // that exist
  int diagonal;   // so many keys its first query sees, if there are as many

  BlockOfQueries() = default;
  __device__ BlockOfQueries(const Args& a, int64_t head, int64_t first, int most)
      : head(static_cast<int>(head)), first(static_cast<int>(first)) {
    const KeyRange range = keys_of(a, head);
    first_key = static_cast<int>(min(range.begin, a.k_length));
    queries = static_cast<int>(min(int64_t{most}, a.q_length - first));
    keys = static_cast<int>(max(range.end - range.begin, int64_t{0}));
    diagonal = keys;
    if (a.causal) diagonal = static_cast<int>(max(first + a.k_length - a.q_length + 1 - range.begin, -int64_t{most}));
  }

  // How many keys query `i` of the block sees, the first ones; 0 or less: none. Beyond its last query as many as that.
  __device__ int seen_by(int i) const { return min(keys, diagonal + min(i, queries - 1)); }
  __device__ bool begins_behind(int, int) const { return false; }  // whether query `i` sees only keys behind `key`
};

}  // namespace kf::KF_BACKEND::attention
