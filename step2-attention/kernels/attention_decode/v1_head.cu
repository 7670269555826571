// attention_decode v1_head: a block a head
//
// Idea      One query needs every key once: a dot product with each, a weight, and a weighted sum of the values. A
//           warp takes a key at a time, its lanes the columns; the warps of a block share the keys. Each warp keeps
//           an online softmax of its own, and in the end the block puts them together.
// Launch    grid B·H, block 256; the queries one after the other
// Moves     (2·B·Hkv·Sk + 2·B·H·Sq)·D·sizeof(T) + 4·B·H·Sq bytes, and K and V again for each further query and head
//           that share them, from a cache; 4·B·H·Sq·Sk·D FLOPs, B·H·Sq·Sk exponentials
// Limits    D ≤ 256; B·H ≤ 2³¹−1. GPT-2 has 12 heads: at batch 1, 12 multiprocessors of an H200 work and 120 do not.
//           A warp waits for each key's page, key and sum before it asks for the next
#include <step2/attention_decode/parts.h>

#include "rungs.h"

namespace kf::KF_BACKEND::attention_decode {
namespace {

constexpr int kWarps = 8;

// kColumns values of the query and of the output in each lane.
template <int kColumns, class T>
__global__ void __launch_bounds__(kWarps* kWarpSize) v1_head_kernel(Args a) {
  using C = compute_t<T>;
  __shared__ C max[kWarps], sum[kWarps], outs[kWarps][kColumns * kWarpSize];
  const auto heads = static_cast<unsigned>(a.heads);
  const unsigned batch = blockIdx.x / heads, head = blockIdx.x % heads;
  const unsigned kv_head = head / (heads / static_cast<unsigned>(a.kv_heads));
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const KeyRange keys = keys_of(a, blockIdx.x);

  for (unsigned query = 0; query < a.q_length; ++query) {
    const QueryRow query_row = {batch, head, query};
    const T* q_row = static_cast<const T*>(a.q) + query_row.offset(a.q_stride);
    C q[kColumns], out[kColumns] = {};
    for (int c = 0; c < kColumns; ++c) {
      const int column = c * kWarpSize + lane;
      q[c] = column < a.head_dim ? to_compute(q_row[column]) * static_cast<C>(a.scale) : C(0);
    }
    OnlineSoftmax<C> softmax;

    for (int64_t key = keys.begin + warp; key < keys_seen(a, keys, query).end; key += kWarps) {
      const int64_t page = page_of(a, batch, key / a.block_size);
      const int64_t position = key % a.block_size;
      const bool exists = page >= 0;
      const T* k =
          static_cast<const T*>(a.k) + page * a.k_stride.batch + kv_head * a.k_stride.head + position * a.k_stride.seq;
      const T* v =
          static_cast<const T*>(a.v) + page * a.v_stride.batch + kv_head * a.v_stride.head + position * a.v_stride.seq;
      C score = 0;
      for (int c = 0; c < kColumns; ++c) {
        const int column = c * kWarpSize + lane;
        if (exists && column < a.head_dim) score += q[c] * to_compute(k[column]);
      }
      score = exists ? warp_sum(score) : C(NAN);
      const C factor = softmax.push(score), weight = softmax.weight(score);
      for (int c = 0; c < kColumns; ++c) {
        const int column = c * kWarpSize + lane;
        out[c] = out[c] * factor + weight * (exists && column < a.head_dim ? to_compute(v[column]) : C(0));
      }
    }

    if (lane == 0) {
      max[warp] = softmax.max;
      sum[warp] = softmax.sum;
    }
    for (int c = 0; c < kColumns; ++c) outs[warp][c * kWarpSize + lane] = out[c];
    __syncthreads();
    for (int column = threadIdx.x; column < a.head_dim; column += kWarps * kWarpSize) {
      const auto of_warp = [&](int w) { return Part<C>{max[w], sum[w], outs[w][column]}; };
      write_out<OfE, T>(a, query_row, column, put_together<OfE, C>(kWarps, of_warp));
    }
    __syncthreads();  // nobody writes the next query's parts before all have read these
  }
}

template <int kColumns, class T>
void launch(const Args& a, void* stream) {
  const auto blocks = static_cast<unsigned>(a.batch * a.heads);
  v1_head_kernel<kColumns, T><<<blocks, kWarps * kWarpSize, 0, as_stream(stream)>>>(a);
}

}  // namespace

std::string v1_head_can_implement(const Args& a) {
  if (a.head_dim > 256) return "takes head_dim ≤ 256, got " + std::to_string(a.head_dim);
  const int64_t heads = a.batch * a.heads;
  if (heads > INT32_MAX) return "takes at most 2147483647 heads in all batches, got " + std::to_string(heads);
  return "";
}

void v1_head(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const auto launch_columns = a.head_dim <= 64 ? launch<2, T> : a.head_dim <= 128 ? launch<4, T> : launch<8, T>;
    launch_columns(a, stream);
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::attention_decode
