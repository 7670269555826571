// Which keys a query sees, and how parts of a softmax are put together: what all rungs share.
//
// Of any set of keys a softmax needs three things to be known: the greatest score, the sum of the weights against it,
// and the values so weighted. Two sets then make one, whoever looked at them: a warp, a block, another multiprocessor.
#pragma once

#include <kf/launch.h>
#include <kf/numeric.h>
#include <step2/attention/rows.h>
#include <step2/attention_decode/args.h>
#include <step2/online_softmax.h>
#include <step2/reduce.h>

#include <algorithm>

namespace kf::KF_BACKEND::attention_decode {

using attention::KeyRange;
using attention::keys_of;
using attention::kv_head_of;
using attention::row_of;
using attention::Strides;
using kf::attention_decode::Args;

// Of the keys that exist, those that query `query` sees: the last query all of them.
__device__ inline KeyRange keys_seen(const Args& a, const KeyRange& keys, int64_t query) {
  return {keys.begin, keys.end - (a.q_length - 1 - query)};
}

// The page that entry `logical_page` of the batch's table names, negative for one that does not exist; without a table
// the whole cache of a batch is one.
__device__ inline int64_t page_of(const Args& a, int64_t batch, int64_t logical_page) {
  if (a.block_table == nullptr) return batch;
  const int64_t page = a.block_table[batch * a.table_stride + logical_page];
  return page < a.blocks ? page : -1;
}

// A row of q, of the output and of the log-sum-exps: which batch, which of its heads, which query.
struct QueryRow {
  unsigned batch, head, query;

  __device__ int64_t offset(const Strides& stride) const {
    return batch * stride.batch + head * stride.head + query * stride.seq;
  }
  // Its number among all rows.
  __device__ int64_t row(const Args& a) const { return (batch * a.heads + head) * a.q_length + query; }
};

// Of some keys: the greatest score, the sum of the weights against it, and one column of the values so weighted.
template <class C>
struct Part {
  C max = -INFINITY;
  C sum = 0;
  C out = 0;
};

// What scores are powers of: e, or 2 where a rung has multiplied them by log₂e.
struct OfE {
  template <class C>
  __device__ static C power(C x) {
    return exponential(x);
  }
  template <class C>
  __device__ static C logarithm_of(C max, C sum) {
    return max + logarithm(sum);
  }
};
struct Of2 {
  __device__ static float power(float x) { return exp2_approx(x); }
  __device__ static float logarithm_of(float max, float sum) {
    return max * static_cast<float>(1 / kLog2e) + logarithm(sum);
  }
};

// All `count` parts as one, always in the same order: two runs agree to the last bit. part_of(i) gives the i-th.
// Not unrolled: where a kernel runs for a few microseconds, loading its instructions is a part of them.
template <class Base, class C, class PartOf>
__device__ __forceinline__ Part<C> put_together(int count, PartOf part_of) {
  Part<C> all;
#pragma unroll 1
  for (int i = 0; i < count; ++i) all.max = greater_of(all.max, part_of(i).max);
  const C base = all.max == C(-INFINITY) ? C(0) : all.max;  // no keys at all: −inf − (−inf) would be NaN
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const Part<C> part = part_of(i);
    const C weight = Base::power(part.max - base);
    all.sum += part.sum * weight;
    all.out += part.out * weight;
  }
  return all;
}

// Column `column` of a row is complete.
template <class Base, class T>
__device__ __forceinline__ void write_out(const Args& a, const QueryRow& query_row, int column,
                                          const Part<compute_t<T>>& all) {
  using C = compute_t<T>;
  const C inverse = all.sum == C(0) ? C(0) : C(1) / all.sum;  // 0: a query that sees no key
  static_cast<T*>(a.out)[query_row.offset(a.out_stride) + column] = from_compute<T>(all.out * inverse);
  if (column == 0) static_cast<C*>(a.lse)[query_row.row(a)] = Base::logarithm_of(all.max, all.sum);
}

// Whether each row of q, k and v begins at a multiple of 16 bytes, as attention_host.cpp hands them over.
inline bool rows_are_aligned(const Args& a) {
  const int64_t vector = 16 / size_of(a.dtype);
  const auto whole = [&](int64_t size, int64_t distance) { return size <= 1 || distance % vector == 0; };
  const auto aligned = [&](const void* first, const Strides& stride, int64_t batch, int64_t heads, int64_t length) {
    return reinterpret_cast<uintptr_t>(first) % 16 == 0 && whole(batch, stride.batch) && whole(heads, stride.head) &&
           whole(length, stride.seq);
  };
  const int64_t pages = a.block_table == nullptr ? a.batch : a.blocks;
  return aligned(a.q, a.q_stride, a.batch, a.heads, a.q_length) &&
         aligned(a.k, a.k_stride, pages, a.kv_heads, a.block_size) &&
         aligned(a.v, a.v_stride, pages, a.kv_heads, a.block_size);
}

// Why a block cannot have so many bytes of shared memory; "" if it can.
inline std::string fits_shared(int64_t bytes) { return too_much_shared_memory(bytes, "a part for each warp"); }

// ---- parts of several blocks, in global memory ----

// How many blocks share the keys that `groups` groups of blocks each have: as many as give `blocks` for each
// multiprocessor, of at least `least` keys each.
inline int splits_for(const Args& a, int64_t groups, int64_t blocks, int64_t least) {
  const int64_t wanted = blocks * multiprocessors() / groups;
  return static_cast<int>(std::clamp<int64_t>(wanted, 1, std::min<int64_t>(64, ceil_div(a.k_length, least))));
}

// Scratch begins with a counter for each group of blocks; then come, split by split, the parts of all rows.
__host__ __device__ constexpr int64_t counters_bytes(int64_t groups) {
  return ceil_div(groups * int64_t{sizeof(unsigned)}, 16) * 16;
}

inline int64_t parts_bytes(const Args& a, int64_t groups, int splits) {
  const int64_t rows = a.batch * a.heads * a.q_length;
  return splits == 1 ? 0 : counters_bytes(groups) + splits * rows * (a.head_dim + 2) * int64_t{sizeof(float)};
}

inline void clear_counters(const Args& a, int64_t groups, int splits, void* stream) {
  if (splits == 1) return;
  check(cudaMemsetAsync(a.scratch, 0, counters_bytes(groups), as_stream(stream)), "cudaMemsetAsync");
}

struct Parts {
  float* first;
  int64_t rows;
  int64_t columns;

  __device__ Parts(const Args& a, int64_t groups)
      : first(reinterpret_cast<float*>(static_cast<char*>(a.scratch) + counters_bytes(groups))),
        rows(a.batch * a.heads * a.q_length),
        columns(a.head_dim) {}

  __device__ float* of(int split, int64_t row) const { return first + (split * rows + row) * (columns + 2); }

  __device__ void store(int split, int64_t row, int column, const Part<float>& part) const {
    float* to = of(split, row);
    to[2 + column] = part.out;
    if (column != 0) return;
    to[0] = part.max;
    to[1] = part.sum;
  }

  __device__ Part<float> load(int split, int64_t row, int column) const {
    const float* from = of(split, row);
    return {from[0], from[1], from[2 + column]};
  }
};

// True in the block that comes last of `blocks`. It then sees what the others had written before they came.
__device__ inline bool is_last_block(unsigned* counter, unsigned blocks) {
  __shared__ bool last;
  __threadfence();  // what this thread has written comes before the count
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(counter, 1u) == blocks - 1;
  __syncthreads();
  __threadfence();
  return last;
}

}  // namespace kf::KF_BACKEND::attention_decode
