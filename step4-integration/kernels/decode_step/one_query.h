// Attention of one query a head over the cache: a cluster of blocks a head, which share the keys, and so do each
// block's warps.
//
// Of the keys all but the newest lay there before this token began, so they are asked for before the kernels in front
// have ended; only the query and the newest key are waited for. A few lanes share a key, each with 16 bytes of it, and
// each such group has an online softmax of its own. In the end groups are put together by shuffles, warps through
// shared memory, blocks through that of the cluster's first; always in the same order.
#pragma once

#include <step2/attention_decode/parts.h>
#include <step2/cluster.h>
#include <step2/cp_async.h>
#include <step2/dependent_launch.h>

#include "place.h"
#include "weight_ring.h"

namespace kf::KF_BACKEND::decode_step {

constexpr int kQueryThreads = 128;
constexpr int kQueryWarps = kQueryThreads / kWarpSize;
constexpr int kMostBlocks = 8;
constexpr int kKeysOfLane = 4;  // in a tile: as many vectors of K, and of V

// Of some keys: the greatest score, the sum of the weights against it, and the values so weighted. Scores are powers of
// 2, times log₂e.
template <int kColumns>
struct KeysPart {
  float out[kColumns];
  float max, sum;
};

// The `count` parts of one column as one. Those after `count` are not looked at.
template <int kMost, int kColumns>
__device__ __forceinline__ attention_decode::Part<float> put_together(const KeysPart<kColumns>* parts, int count,
                                                                      int column) {
  attention_decode::Part<float> all;
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    if (i < count) all.max = greater_of(all.max, parts[i].max);
  }
  const float base = all.max == -INFINITY ? 0.0f : all.max;  // no keys at all: −inf − (−inf) would be NaN
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    if (i >= count) continue;
    const float weight = exp2_approx(parts[i].max - base);
    all.sum += parts[i].sum * weight;
    all.out += parts[i].out[column] * weight;
  }
  return all;
}

// A group's softmax; each lane has eight columns.
struct Attending {
  float q[8], out[8] = {};
  float max = -INFINITY, sum = 0;

  template <class T>
  __device__ __forceinline__ float product(const Vector16& key) const {
    Vector<T, 8> k;
    memcpy(&k, &key, sizeof k);
    float of_key[8], dot = 0;
    widen(k, of_key);
#pragma unroll
    for (int j = 0; j < 8; ++j) dot += q[j] * of_key[j];
    return dot;
  }

  // N keys with their scores; −inf: none.
  template <class T, int N>
  __device__ __forceinline__ void take(const float (&score)[N], const Vector16 (&value)[N]) {
    float now = max;
#pragma unroll
    for (int i = 0; i < N; ++i) now = greater_of(now, score[i]);
    const float base = now == -INFINITY ? 0.0f : now, factor = exp2_approx(max - base);
    max = now;
    sum *= factor;
#pragma unroll
    for (int j = 0; j < 8; ++j) out[j] *= factor;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float weight = exp2_approx(score[i] - base);
      sum += weight;
      Vector<T, 8> v;
      memcpy(&v, &value[i], sizeof v);
      float of_value[8];
      widen(v, of_value);
#pragma unroll
      for (int j = 0; j < 8; ++j) out[j] += weight * of_value[j];
    }
  }

  // Puts the warp's groups together, of kLanes lanes each.
  template <int kLanes>
  __device__ __forceinline__ void merge() {
#pragma unroll
    for (int away = kLanes; away < kWarpSize; away *= 2) {
      const float other = __shfl_xor_sync(kFullWarp, max, away), now = greater_of(max, other);
      const float factor = exp2_approx(max - (now == -INFINITY ? 0.0f : now));
      max = now;
      sum *= factor;
      sum += __shfl_xor_sync(kFullWarp, sum, away);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        out[j] *= factor;
        out[j] += __shfl_xor_sync(kFullWarp, out[j], away);
      }
    }
  }
};

// kLanes lanes a key: 8 for up to 64 columns, 16 for up to 128. kRows: of the batch, for the ring.
template <class T, int kLanes, int kRows>
__global__ void __launch_bounds__(kQueryThreads)
    one_query_kernel(const Args a, int layer, float scale_log2, const T* q, T* attended) {
  constexpr int kColumns = kLanes * 8, kGroups = kWarpSize / kLanes, kKeys = kGroups * kKeysOfLane;
  constexpr int kStages = Ring<kRows>::kStages;
  extern __shared__ __align__(128) unsigned char memory[];  // kQueryWarps rings
  __shared__ KeysPart<kColumns> of_warp[kQueryWarps], of_block[kMostBlocks];
  const int blocks = static_cast<int>(gridDim.x), rank = static_cast<int>(blockIdx.x);
  const int head = blockIdx.y, row = blockIdx.z, lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int group = lane / kLanes, column = lane % kLanes * 8;
  const bool has_columns = column < a.head_dim;
  const Place place(a, row);
  const int before = place.before(), warps = blocks * kQueryWarps, first = rank * kQueryWarps + warp;
  const T* k = in_cache<const T>(a.k_cache, a.k_stride, layer, row, head, place.begin) + column;
  const T* v = in_cache<const T>(a.v_cache, a.v_stride, layer, row, head, place.begin) + column;

  // Tiles of 16 keys, or of 8: this warp has every warps-th of them.
  const int tiles = (before + kKeys - 1) / kKeys, count = (tiles - first + warps - 1) / warps;
  const auto key_of = [&](int tile, int i) { return (first + tile * warps) * kKeys + i * kGroups + group; };
  Ring<kRows>& ring = reinterpret_cast<Ring<kRows>*>(memory)[warp];
  const auto ask = [&](int tile, int stage) {
#pragma unroll
    for (int i = 0; i < kKeysOfLane; ++i) {
      const int key = key_of(tile, i);
      const bool wanted = key < before && has_columns;
      const int64_t at = wanted ? key : 0;
      cp_async_16(&ring.stage[stage][i][lane], wanted ? k + at * a.k_stride.slot : k, wanted ? 16 : 0);
      cp_async_16(&ring.stage[stage][kKeysOfLane + i][lane], wanted ? v + at * a.v_stride.slot : v, wanted ? 16 : 0);
    }
  };
#pragma unroll
  for (int s = 0; s < kStages; ++s) {
    if (s < count) ask(s, s);
    cp_async_commit();
  }
  launch_dependent_grids();
  __syncwarp();
  if (blocks > 1) cluster_barrier_arrive_relaxed();

  wait_on_dependent_grids();
  const auto load = [&](const T* from, bool wanted) {
    Vector16 vector{};
    const uint4 bits = wanted ? __ldcg(reinterpret_cast<const uint4*>(from)) : uint4{};
    memcpy(&vector, &bits, sizeof vector);
    return vector;
  };
  const bool has_newest = first == 0 && group == 0 && place.slot >= 0;  // one group of all takes it
  const Vector16 query = load(q + row * own_width(a) + head * a.head_dim + column, has_columns);
  const Vector16 newest_k = load(k + before * a.k_stride.slot, has_newest && has_columns);
  const Vector16 newest_v[1] = {load(v + before * a.v_stride.slot, has_newest && has_columns)};
  Attending own;
  {
    Vector<T, 8> rounded;
    memcpy(&rounded, &query, sizeof rounded);
    widen(rounded, own.q);
#pragma unroll
    for (float& column_of_q : own.q) column_of_q *= scale_log2;
  }
  const auto over_key = [](float part) {
#pragma unroll
    for (int away = kLanes / 2; away > 0; away /= 2) part += __shfl_xor_sync(kFullWarp, part, away);
    return part;
  };

  int stage = 0;
#pragma unroll 1
  for (int tile = 0; tile < count; ++tile) {
    cp_async_wait<kStages - 1>();
    float score[kKeysOfLane];
    Vector16 value[kKeysOfLane];
#pragma unroll
    for (int i = 0; i < kKeysOfLane; ++i) {
      score[i] = over_key(own.product<T>(ring.stage[stage][i][lane]));
      if (key_of(tile, i) >= before) score[i] = -INFINITY;
      value[i] = ring.stage[stage][kKeysOfLane + i][lane];
    }
    own.take<T>(score, value);
    if (tile + kStages < count) ask(tile + kStages, stage);
    cp_async_commit();
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  const float of_newest[1] = {over_key(own.product<T>(newest_k))};
  if (has_newest) own.take<T>(of_newest, newest_v);

  own.merge<kLanes>();
  if (group == 0) {
#pragma unroll
    for (int j = 0; j < 8; ++j) of_warp[warp].out[column + j] = own.out[j];
  }
  if (lane == 0) {
    of_warp[warp].max = own.max;
    of_warp[warp].sum = own.sum;
  }
  __syncthreads();
  const int of_thread = static_cast<int>(threadIdx.x);
  attention_decode::Part<float> all;
  if (of_thread < a.head_dim) all = put_together<kQueryWarps>(of_warp, kQueryWarps, of_thread);
  if (blocks > 1) {
    cluster_barrier_wait();  // each block has begun, so its memory may be written into
    if (of_thread < a.head_dim) {
      store_remote(remote_address(&of_block[rank].out[of_thread], 0), all.out);
      if (of_thread == 0) {
        store_remote(remote_address(&of_block[rank].max, 0), all.max);
        store_remote(remote_address(&of_block[rank].sum, 0), all.sum);
      }
    }
    cluster_sync();
    if (rank > 0) return;
    if (of_thread < a.head_dim) all = put_together<kMostBlocks>(of_block, blocks, of_thread);
  }
  if (of_thread < a.head_dim)
    attended[row * own_width(a) + head * a.head_dim + of_thread] = from_compute<T>(all.out / all.sum);
}

}  // namespace kf::KF_BACKEND::decode_step
