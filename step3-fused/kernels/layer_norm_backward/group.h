// What the persistent rungs share: how many threads are a row's group, how many groups a block has, and what helps them
// to fit into registers.
#pragma once

#include <kf/launch.h>
#include <step2/warpgroup.h>
#include <step3/held_row.h>

#include "rungs.h"

namespace kf::KF_BACKEND::layer_norm_backward {

constexpr int64_t kMostBlocks = 132;  // a constant: a sum's order, and so its last bit, must not depend on the GPU

// Warps of a block: 16 have up to 128 registers for each thread, enough for 24 columns; 12 have 168.
template <class Row>
constexpr int kWarpsOfBlock = Row::kThreads == 512 || Row::kItems * Row::N <= 24 ? 16 : 12;
template <class Row>
constexpr int kGroups = kWarpsOfBlock<Row> * kWarpSize / Row::kThreads;

inline bool all_aligned(const Args& a) {
  return aligned_16(a.grad, a.x, a.weight, a.grad_sum, a.grad_x);  // null is aligned, too
}

// A barrier of a group's threads alone.
template <class Row>
__device__ __forceinline__ void meet(int group) {
  if constexpr (Row::kThreads == kWarpSize) {
    __syncwarp();
  } else {
    named_barrier_sync(1 + group, Row::kThreads);
  }
}

// Writes N neighbours to shared memory. Of eight floats half of the lanes write the last four first: if all wrote 16 of
// each 32 bytes, they would need half of the banks, and each twice.
template <int N, class C>
__device__ __forceinline__ void store_side_by_side(C* to, const C (&value)[N]) {
  if constexpr (N == 8 && sizeof(C) == 4) {
    const bool last_first = threadIdx.x / 4 % 2 == 1;
    Vector<C, 4> one, other;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      one.element[j] = last_first ? value[4 + j] : value[j];
      other.element[j] = last_first ? value[j] : value[4 + j];
    }
    store_vector<4>(to + (last_first ? 4 : 0), one);
    store_vector<4>(to + (last_first ? 0 : 4), other);
  } else {
    store_values<(N > 1)>(to, value);
  }
}

// When its rows are done: the sums of a block's groups, added up in the order of their numbers, to this block's part of
// `partial`. `memory`, shared: `pitch` elements for each group, of which its sums take the first 2·width. A group
// writes them as soon as its own rows are done.
template <class Row, class C>
__device__ __forceinline__ void leave_sums(const C (&of_weight)[Row::kItems][Row::N],
                                           const C (&of_bias)[Row::kItems][Row::N], C* memory, int pitch, int group,
                                           int groups, int width, C* partial) {
  Row::for_each_piece(width, [&](int i, int column) {
    C* own = memory + group * pitch + column;
    store_side_by_side(own, of_weight[i]);
    store_side_by_side(own + width, of_bias[i]);
  });
  __syncthreads();  // what all groups have written is read now
  constexpr int kEach = Row::N > 1 ? 16 / sizeof(C) : 1;
  const int step = groups * Row::kThreads * kEach;
  for (int c = (group * Row::kThreads + threadIdx.x) * kEach; c < 2 * width; c += step) {
    C sum[kEach] = {};
#pragma unroll 8
    for (int g = 0; g < groups; ++g) {
      const auto of_group = load_vector<kEach>(memory + g * pitch + c);
#pragma unroll
      for (int j = 0; j < kEach; ++j) sum[j] += of_group.element[j];
    }
    store_values<(kEach > 1)>(partial + int64_t{blockIdx.x} * 2 * width + c, sum);
  }
}

// For v3: calls f(HeldRow) with the shape that suits rows of `width` elements of T.
template <class T, class F>
void with_shape(int64_t width, bool vectors, F&& f) {
  constexpr int N = 16 / sizeof(T);
  if (vectors && width % N == 0) {
    const int64_t count = width / N;
    count <= 32     ? f(HeldRow<32, 1, N>{})
    : count <= 64   ? f(HeldRow<32, 2, N>{})
    : count <= 96   ? f(HeldRow<32, 3, N>{})
    : count <= 128  ? f(HeldRow<32, 4, N>{})
    : count <= 192  ? f(HeldRow<64, 3, N>{})
    : count <= 256  ? f(HeldRow<64, 4, N>{})
    : count <= 512  ? f(HeldRow<128, 4, N>{})
    : count <= 1024 ? f(HeldRow<256, 4, N>{})
                    : f(HeldRow<512, 4, N>{});
  } else {  // value by value: neighbouring lanes still read neighbouring columns
    width <= 256    ? f(HeldRow<32, 8, 1>{})
    : width <= 512  ? f(HeldRow<64, 8, 1>{})
    : width <= 1024 ? f(HeldRow<64, 16, 1>{})
    : width <= 2048 ? f(HeldRow<128, 16, 1>{})
    : width <= 4096 ? f(HeldRow<256, 16, 1>{})
                    : f(HeldRow<512, 16, 1>{});
  }
}

// For v4: calls f(Type<T>, HeldRow) with the shape that suits rows of `width` elements, up to 32 KB.
template <class F>
void with_bulk_row(DType dtype, int64_t width, F&& f) {
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    if constexpr (sizeof(T) < 8) {
      constexpr int N = 16 / sizeof(T);
      const int64_t items = ceil_div(width, kWarpSize * N);
      items <= 1    ? f(type, HeldRow<32, 1, N>{})
      : items <= 2  ? f(type, HeldRow<32, 2, N>{})
      : items <= 3  ? f(type, HeldRow<32, 3, N>{})
      : items <= 4  ? f(type, HeldRow<32, 4, N>{})
      : items <= 5  ? f(type, HeldRow<32, 5, N>{})
      : items <= 7  ? f(type, HeldRow<32, 7, N>{})
      : items <= 8  ? f(type, HeldRow<32, 8, N>{})
      : items <= 16 ? f(type, HeldRow<128, 4, N>{})
      : items <= 32 ? f(type, HeldRow<256, 4, N>{})
                    : f(type, HeldRow<512, 4, N>{});
    }
  });
}

// For v4: shared memory for the rings of all groups.
constexpr int64_t kRingBytes = 224 * 1024;

// For v4: 16 warps have up to 128 registers for each thread, 8 have 255. 32 columns in 8 vectors of floats would spill.
template <class Row>
constexpr int kMostGroups = (Row::kItems * Row::N <= 32 && Row::kItems < 8 ? 16 : 8) * kWarpSize / Row::kThreads;

// For v4: where a row may begin in shared memory. Bulk copies need but a multiple of 16 bytes. To other addresses than
// multiples of 128 they can be slow: with them a kernel for the forward pass, of 16384 rows of 768 bfloat16 that lay 96
// bytes behind one, took 55 µs on an H100, and 22 when they lay there.
constexpr int64_t kBulkAlignment = 128;

// For v4: from one row in shared memory to the next, in elements of `element` bytes.
__host__ __device__ constexpr int64_t bulk_pitch(int64_t width, int64_t element) {
  return ceil_div(width * element, kBulkAlignment) * kBulkAlignment / element;
}

// For v4: what a group needs of shared memory: its ring. Of two stages or more, it has room for the sums later.
inline int64_t bytes_a_group(const Args& a, int64_t stages) {
  const int64_t element = size_of(a.dtype);
  return stages * (a.grad_sum == nullptr ? 2 : 3) * bulk_pitch(a.width, element) * element;
}

}  // namespace kf::KF_BACKEND::layer_norm_backward
