// What the rungs for Hopper share: tensor maps, the two products, the softmax of scores that lie as wgmma leaves them,
// and the way out.
#pragma once

#include <step1/vector.h>
#include <step2/attention/packed_queries.h>
#include <step2/mma.h>
#include <step2/online_softmax.h>
#include <step2/pipeline.h>
#include <step2/reduce.h>
#include <step2/tensor_map.h>
#include <step2/warpgroup.h>
#include <step2/wgmma.h>

#include <string>

namespace kf::KF_BACKEND::attention {

// 128 bytes, the widest row that TMA and wgmma can swizzle: wider tiles are several of these side by side.
constexpr int kSlice = 64;

inline std::string on_hopper(const Args& a, int64_t queries) {
  if (!is_above_0(a.scale)) return "takes a scale above 0, got " + std::to_string(a.scale);
  const std::string why_not = on_tensor_cores(a, queries);
  if (!why_not.empty()) return why_not;
  if (compute_capability() != 90) return "needs a GPU of compute capability 9.0";
  return "";
}

// A map of q, k, v or the output, from which TMA copies `rows` rows of 64 columns of one head. What lies beyond the
// last row or column arrives as zeros, and is not stored.
template <class T>
CUtensorMap map_of(const Args& a, const void* first, const Strides& stride, int64_t heads, int64_t length, int rows) {
  // The distance to a neighbour that does not exist may be any number, of which the driver would refuse some.
  const auto bytes = [&](int64_t size, int64_t distance) {
    return static_cast<uint64_t>((size > 1 ? distance : a.head_dim) * int64_t{sizeof(T)});
  };
  return make_tensor_map<T, 4>(static_cast<const T*>(first),
                               {static_cast<uint64_t>(a.head_dim), static_cast<uint64_t>(length),
                                static_cast<uint64_t>(heads), static_cast<uint64_t>(a.batch)},
                               {bytes(length, stride.seq), bytes(heads, stride.head), bytes(a.batch, stride.batch)},
                               {kSlice, static_cast<uint32_t>(rows), 1, 1}, Swizzle::k128);
}

struct Maps {
  CUtensorMap q, k, v, out;
};

template <class T>
Maps maps_of(const Args& a, int keys) {
  return {map_of<T>(a, a.q, a.q_stride, a.heads, a.q_length, 64),
          map_of<T>(a, a.k, a.k_stride, a.kv_heads, a.k_length, keys),
          map_of<T>(a, a.v, a.v_stride, a.kv_heads, a.k_length, keys),
          map_of<T>(a, a.out, a.out_stride, a.heads, a.q_length, 64)};
}

// A head of q as TMA names it, and the head of k and v that it reads.
struct Head {
  int batch;
  int head;  // of this batch
  int kv_head;

  __device__ Head(const Args& a, int head_of_all)
      : batch(head_of_all / static_cast<int>(a.heads)),
        head(head_of_all % static_cast<int>(a.heads)),
        kv_head(head / (static_cast<int>(a.heads) / static_cast<int>(a.kv_heads))) {}
};

// What all lanes have read alike, in a form that shows the compiler so.
__device__ inline BlockOfQueries in_all_lanes(const BlockOfQueries& block) {
  BlockOfQueries same;
  same.head = warp_uniform(block.head);
  same.first = warp_uniform(block.first);
  same.first_key = warp_uniform(block.first_key);
  same.queries = warp_uniform(block.queries);
  same.keys = warp_uniform(block.keys);
  same.diagonal = warp_uniform(block.diagonal);
  return same;
}

__device__ inline PackedQueries in_all_lanes(const PackedQueries& block) {
  PackedQueries same;
  static_cast<BlockOfQueries&>(same) = in_all_lanes(static_cast<const BlockOfQueries&>(block));
  same.rows = block.rows;
  same.straddles = block.straddles;
  return same;
}

// Copies that many rows of a head, slice by slice, into `tile`. One thread does this.
template <int kSlices, int kRows, class T>
__device__ void load_slices(T (*tile)[kRows * kSlice], const CUtensorMap* map, uint64_t* barrier, int row, int head,
                            int batch) {
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
    tma_load(tile[slice], map, barrier, slice * kSlice, row, head, batch);
  }
}

// Zeros in the rows first ≤ i < end of a tile: padding may hold NaN there, which a weight of 0 would not make 0.
// Thread `thread` of `threads` does its part; products may read it after tma_store_fence by each and a barrier.
template <int kSlices, int kRows, class T>
__device__ void clear_rows(T (*tile)[kRows * kSlice], int first, int thread, int threads, int end = kRows) {
  constexpr int kVector = 8;  // elements of 16 bytes: a row is cleared whole, so where its chunks lie does not matter
  for (int slice = 0; slice < kSlices; ++slice) {
    for (int i = first * kSlice + thread * kVector; i < end * kSlice; i += threads * kVector) {
      store_vector(tile[slice] + i, Vector<T, kVector>{});
    }
  }
}

// Issues score = Q·Kᵀ for a warpgroup's 64 queries, 16 columns at a time, and closes the group.
template <int kColumns, int kKeys, class T>
__device__ __forceinline__ void issue_scores(float (&score)[kKeys / 2], const T (*q)[64 * kSlice],
                                             const T (*k)[kKeys * kSlice]) {
  const uint64_t q_tile = matrix_descriptor(q, 0, 1024, Swizzle::k128);
  const uint64_t k_tile = matrix_descriptor(k, 0, 1024, Swizzle::k128);
#pragma unroll
  for (int d = 0; d < kColumns / 16; ++d) {
    const int slice = d / 4, step = d % 4 * 32 >> 4;  // 32 bytes further; descriptors count in 16
    wgmma<kKeys, T>(score, q_tile + (slice * 64 * 128 >> 4) + step, k_tile + (slice * kKeys * 128 >> 4) + step, d > 0);
  }
  wgmma_commit();
}

// The same with Q in registers: q[i] as operand a of 16 columns.
template <int kColumns, int kKeys, class T>
__device__ __forceinline__ void issue_scores(float (&score)[kKeys / 2], const uint32_t (&q)[kColumns / 16][4],
                                             const T (*k)[kKeys * kSlice]) {
  const uint64_t k_tile = matrix_descriptor(k, 0, 1024, Swizzle::k128);
#pragma unroll
  for (int d = 0; d < kColumns / 16; ++d) {
    wgmma<kKeys, T>(score, q[d], k_tile + (d / 4 * kKeys * 128 >> 4) + (d % 4 * 32 >> 4), d > 0);
  }
  wgmma_commit();
}

// Issues out += P·V, 16 keys at a time, and closes the group. V's rows are b's rows: neighbouring elements are of
// neighbouring columns, not of neighbouring keys.
template <int kColumns, int kKeys, class T>
__device__ __forceinline__ void issue_output(float (&out)[kColumns / 2], const uint32_t (&weight)[kKeys / 16][4],
                                             const T (*v)[kKeys * kSlice]) {
  const uint64_t v_tile = matrix_descriptor(v, kKeys * 128, 1024, Swizzle::k128);
#pragma unroll
  for (int key = 0; key < kKeys / 16; ++key) {
    wgmma<kColumns, T, Major::kMN>(out, weight[key], v_tile + key * (16 * 128 >> 4), true);
  }
  wgmma_commit();
}

// The softmax of a warpgroup's 64 rows, as far as a lane holds them. score[i] is of row g + 8·(i/2 % 2) of its warp and
// of key 8·(i/4) + 2t + i % 2, with g = lane / 4 and t = lane % 4 (step2/wgmma.h): two rows a lane.
struct RowsSoftmax {
  float max[2] = {-INFINITY, -INFINITY};  // the greatest score so far, or not far below it; unscaled
  float sum[2] = {};                      // of this lane's own keys, until `finish`

  // Scores become weights. `scale` has log₂e in it. Returns whether the output so far is to be multiplied by `factor`,
  // for a row of this warp: only where a maximum has grown by more than kMaxLag.
  template <int N>
  __device__ bool weigh(float (&score)[N], float scale, float (&factor)[2]) {
    float highest[2] = {score[0], score[2]}, subtracted[2];
#pragma unroll
    for (int i = 0; i < N; ++i) highest[i / 2 % 2] = greater_of(highest[i / 2 % 2], score[i]);
    bool raised = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      highest[r] = quad_max(highest[r]);
      factor[r] = 1.0f;
      if ((highest[r] - max[r]) * scale > kMaxLag) {  // not if nothing was seen yet and nothing is now: that gives NaN
        factor[r] = exp2_approx((max[r] - highest[r]) * scale);
        max[r] = highest[r];
        sum[r] *= factor[r];
        raised = true;
      }
      subtracted[r] = max[r] == -INFINITY ? 0.0f : max[r] * scale;  // −inf − (−inf) would be NaN
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      score[i] = exp2_approx(score[i] * scale - subtracted[i / 2 % 2]);
      sum[i / 2 % 2] += score[i];
    }
    return __any_sync(kFullWarp, raised);
  }

  // The rows' sums, and what the output is to be multiplied by; 0 where a query sees no key.
  __device__ void finish(float (&inverse)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = quad_sum(sum[r]);
      inverse[r] = sum[r] == 0.0f ? 0.0f : __fdividef(1.0f, sum[r]);  // rcp.approx: far below 2¹²⁶
    }
  }

  // Of row `r`; scale without log₂e.
  __device__ float log_sum_exp(int r, float scale) const { return max[r] * scale + __logf(sum[r]); }
};

// Hides the keys of a tile, from `first_key` on, that the lane's rows do not see. The rows begin at `first_row` of the
// block.
template <class Block, int N>
__device__ __forceinline__ void mask_scores(float (&score)[N], const Block& block, int first_row, int first_key) {
  const int row = first_row + static_cast<int>(threadIdx.x / kWarpSize % 4) * 16 + threadIdx.x % kWarpSize / 4;
  const int column = first_key + threadIdx.x % 4 * 2;  // of score[0]
  const int seen[2] = {block.seen_by(row) - column, block.seen_by(row + 8) - column};
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i / 4 * 8 + i % 2 >= seen[i / 2 % 2]) score[i] = -INFINITY;
  }
  if constexpr (Block::kPacked) {
    const int from[2] = {block.seen_from(row) - column, block.seen_from(row + 8) - column};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i / 4 * 8 + i % 2 < from[i / 2 % 2]) score[i] = -INFINITY;
    }
  }
}

// Makes the weights of a tile that dropout drops 0. The rows begin at `first_row` of the block, the keys at
// `first_key`.
template <int N>
__device__ __forceinline__ void drop_weights(AttentionDropout& dropout, float (&weight)[N], const BlockOfQueries& block,
                                             int first_row, int first_key) {
  const int row = first_row + static_cast<int>(threadIdx.x / kWarpSize % 4) * 16 + threadIdx.x % kWarpSize / 4;
  const int column = first_key + threadIdx.x % 4 * 2;  // of weight[0]
  AttentionDropout::drop(weight, dropout.kept<false, N>(block.head, block.first + row, block.first_key + column));
}

// Weights of 16 keys at a time as operand a of the next product, rounded.
template <class T, int N>
__device__ void pack_weights(const float (&score)[N], uint32_t (&weight)[N / 8][4]) {
#pragma unroll
  for (int i = 0; i < N; i += 2) weight[i / 8][i / 4 % 2 * 2 + i / 2 % 2] = pack<T>(score[i], score[i + 1]);
}

// Rows begin ≤ i < end of the 64 that lie in `tile` as TMA would take them, to row first + i of a head. Thread `thread`
// of `threads` does its part.
template <int kSlices, class T>
__device__ void copy_rows(const T (*tile)[64 * kSlice], int begin, int end, const Rows<T>& head, int64_t first,
                          int64_t columns, int thread, int threads) {
  constexpr int kVector = 8, kVectors = kSlices * kSlice / kVector;  // elements of 16 bytes; of a row
#pragma unroll 1
  for (int first_vector = 0; first_vector < 64 * kVectors; first_vector += threads) {  // all threads as often
    const int row = (first_vector + thread) / kVectors, column = (first_vector + thread) % kVectors * kVector;
    if (row < begin || row >= end || column >= columns) continue;
    const int at = swizzled_offset((row * kSlice + column % kSlice) * int{sizeof(T)}, Swizzle::k128) / int{sizeof(T)};
    store_vector(head.at(first + row) + column, load_vector<kVector>(tile[column / kSlice] + at));
  }
}

// The end of a warpgroup's 64 rows, which begin at `first_row` of the block: the output goes into `tile`, slices of 64
// rows, swizzled, and from there by TMA to where it belongs; the log-sum-exp goes there directly. `head`: of its batch.
// `barrier`: one of this warpgroup's own. `factor`: the output is multiplied by it. Before `tile` is used again, its
// leader must wait by tma_store_wait_read. kApart: behind the block's queries another document's may follow, and TMA
// knows no end but the row's.
template <bool kDropout, bool kApart = false, class T, class Block, int N>
__device__ __forceinline__ void store_rows(const Args& a, const Block& block, int first_row, RowsSoftmax& softmax,
                                           const float (&out)[N], T (*tile)[64 * kSlice], const CUtensorMap* map,
                                           int head, int batch, int barrier, bool leader, float factor = 1.0f) {
  const int lane = threadIdx.x % kWarpSize;
  const int row_of_group = static_cast<int>(threadIdx.x / kWarpSize % 4) * 16 + lane / 4;
  float inverse[2];
  softmax.finish(inverse);
  for (float& number : inverse) number *= factor;
  // Swizzled, chunk c of row r lies at c ^ r % 8: the row's part once, then one XOR for each chunk.
  const uint32_t row_offset = swizzled_offset(row_of_group * kSlice * sizeof(T), Swizzle::k128) + lane % 4 * 4;
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const int slice = i / 32, chunk = i / 4 % 8, row = i / 2 % 2 * 8;  // row: 8 further, the same swizzle
    auto* const to = reinterpret_cast<unsigned char*>(tile[slice]) + (row_offset ^ chunk * 16) + row * 128;
    *reinterpret_cast<uint32_t*>(to) = pack<T>(out[i] * inverse[i / 2 % 2], out[i + 1] * inverse[i / 2 % 2]);
  }
  if constexpr (Block::kPacked) {
    const int warp_row = row_of_group - lane / 4;
    float met[2] = {}, lse[2];
#pragma unroll
    for (int i = 0; i < N; ++i) met[i / 2 % 2] += out[i];
    for (int r = 0; r < 2; ++r) lse[r] = softmax.log_sum_exp(r, static_cast<float>(a.scale));
    repair_rows<kDropout, T>(a, block, first_row + warp_row, met, lse, [&](int row, int column, T number) {
      const int bytes = ((warp_row + row) * kSlice + column % kSlice) * int{sizeof(T)};
      auto* const to = reinterpret_cast<unsigned char*>(tile[column / kSlice]) + swizzled_offset(bytes, Swizzle::k128);
      *reinterpret_cast<T*>(to) = number;
    });
  }
  tma_store_fence();
  named_barrier_sync(barrier, kWarpgroupSize);
  if (kApart && block.queries - first_row < 64) {
    const Rows<T> rows = rows_of<T>(a.out, a.out_stride, block.head, a.heads);
    copy_rows<N / 32>(tile, 0, block.queries - first_row, rows, block.first + first_row, a.head_dim,
                      threadIdx.x % kWarpgroupSize, kWarpgroupSize);
    named_barrier_sync(barrier, kWarpgroupSize);  // all have read the tile
  } else if (leader) {
    for (int slice = 0; slice < N / 32; ++slice) {
      tma_store(map, tile[slice], slice * kSlice, block.first + first_row, head, batch);
    }
    tma_store_commit();
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + row_of_group + 8 * r;
    if (lane % 4 != 0 || row >= block.queries) continue;
    static_cast<float*>(a.lse)[int64_t{block.head} * a.q_length + block.first + row] =
        softmax.log_sum_exp(r, static_cast<float>(a.scale));
  }
}

// Leaves the tile of keys and values that lies there, of which none of a warpgroup's queries sees a key. It must have
// come: else this could count as leaving what was there before.
template <class Shared, int kStages>
__device__ __forceinline__ void skip_tile(Shared& shared, const PipelineState<kStages>& ring, bool leader) {
  if (leader) {
    shared.k_pipe.consumer_wait(ring);
    shared.k_pipe.consumer_release(ring.index);
    shared.v_pipe.consumer_wait(ring);
    shared.v_pipe.consumer_release(ring.index);
  }
  __syncwarp();
}

}  // namespace kf::KF_BACKEND::attention
