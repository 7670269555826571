// Where a row of q, k, v or the output lies, and which keys a query sees.
#pragma once

#include <cuda_runtime.h>
#include <kf/numeric.h>
#include <step2/attention/args.h>

namespace kf::KF_BACKEND::attention {

using kf::attention::Args;
using kf::attention::Strides;

// The first element of row `position`, where `head` counts through all heads of all batches.
template <class T>
__device__ T* row_of(T* first, const Strides& stride, int64_t head, int64_t heads, int64_t position) {
  return first + head / heads * stride.batch + head % heads * stride.head + position * stride.seq;
}

// The head of k and v that head `head` of q reads; both count through all batches.
__device__ inline int64_t kv_head_of(const Args& a, int64_t head) { return head / (a.heads / a.kv_heads); }

// Keys begin ≤ j < end; none where end ≤ begin.
struct KeyRange {
  int64_t begin;
  int64_t end;
};

// Those that exist in the batch of `head`. The host cannot know them without waiting for the GPU, so bounds beyond
// the tensor are cut here. Args: this op's, or another's that has the same members; so below.
template <class Args>
__device__ KeyRange keys_of(const Args& a, int64_t head) {
  const int64_t batch = head / a.heads;
  return {a.key_begin == nullptr ? 0 : max(int64_t{a.key_begin[batch]}, int64_t{0}),
          a.key_end == nullptr ? a.k_length : min(int64_t{a.key_end[batch]}, a.k_length)};
}

// Those of `keys` that `query` sees. A later query never sees less.
template <class Args>
__device__ KeyRange keys_seen(const Args& a, const KeyRange& keys, int64_t query) {
  return {keys.begin, a.causal ? min(keys.end, query + a.k_length - a.q_length + 1) : keys.end};
}

// Rows of one head: row 0 and the distance to the next. Each row is contiguous.
template <class T>
struct Rows {
  T* first;
  int64_t stride;

  __device__ T* at(int64_t row) const { return first + row * stride; }
};

template <class T, class Void>
__device__ Rows<T> rows_of(Void* tensor, const Strides& stride, int64_t head, int64_t heads) {
  return {row_of(static_cast<T*>(tensor), stride, head, heads, 0), stride.seq};
}

// Where head `number` of q, which counts through all batches, has its rows; those of k and v it may share.
template <class T>
struct HeadRows {
  const Args& args;
  const int64_t number;

  __device__ HeadRows(const Args& a, int64_t number) : args(a), number(number) {}

  __device__ Rows<const T> q() const { return rows_of<const T>(args.q, args.q_stride, number, args.heads); }
  __device__ Rows<const T> k() const { return rows_of<const T>(args.k, args.k_stride, kv_head(), args.kv_heads); }
  __device__ Rows<const T> v() const { return rows_of<const T>(args.v, args.v_stride, kv_head(), args.kv_heads); }
  __device__ Rows<T> out() const { return rows_of<T>(args.out, args.out_stride, number, args.heads); }
  __device__ compute_t<T>* lse() const { return static_cast<compute_t<T>*>(args.lse) + number * args.q_length; }
  __device__ KeyRange keys() const { return keys_of(args, number); }  // that exist

 private:
  __device__ int64_t kv_head() const { return kv_head_of(args, number); }
};

}  // namespace kf::KF_BACKEND::attention
