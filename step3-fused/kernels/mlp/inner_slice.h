// A slice of the inner width by a cluster: both layers of it, through shared memory. For few rows.
#pragma once

#include <kf/launch.h>
#include <step2/cluster.h>
#include <step2/hopper_product.h>
#include <step3/epilogues.h>

#include <algorithm>

#include "rungs.h"

namespace kf::KF_BACKEND::mlp {

constexpr int kMostRows = 64, kCluster = 8;
constexpr int kGroups = 3;                              // warpgroups that multiply
constexpr int kMultipliers = kGroups * kWarpgroupSize;  // their threads
constexpr int kInnerThreads = kMultipliers + (kGroups + 1) * kWarpSize;
constexpr int kBox = 64;                   // of the depth: 128 bytes
constexpr int kDeep = 128, kColumns = 32;  // a piece of weights
constexpr int kPiece = kDeep * kColumns;   // elements
constexpr int kXPieces = 2;                // of the depth, to one of x
constexpr int kXDeep = kXPieces * kDeep;
constexpr int kTiles = 2;                          // of kColumns: the most inner columns of a block
constexpr int kStages = 16;                        // for weights and the slice's activation
constexpr int kSumStride = kTiles * kColumns + 8;  // padding against bank conflicts

// Each warpgroup that multiplies has stages of its own for x and for weights. Barriers: full when what was announced is
// there, empty when the group's warps have released the stage; for x, those of the same group in all blocks of the
// cluster.
template <class T>
struct InnerShared {
  T x[kGroups][kMostRows * kXDeep];  // boxes of 64 columns; after the products the group's sums lie there
  T memory[kStages][kPiece];
  Packed<T> bias[kTiles * kColumns / 8];  // of the block's inner columns
  uint64_t x_full[kGroups], x_empty[kGroups], full[kStages], empty[kStages], activation_full;
};

// How the work is shared out.
struct Plan {
  int rows, width;
  int clusters, columns;  // columns: of a block in the first layer
  int tiles;              // they are so many of kColumns
  int k_tiles;            // of x
  int slice_pieces;       // of a slice's depth
  int stages;             // of a group, for weights; those after all groups' hold the activation
  int x_rows;             // that are loaded

  __host__ __device__ int slice() const { return columns * kCluster; }
};

template <class T>
struct InnerArgs {
  Plan plan;
  bool tanh;
  Rows<T> bias_1, preactivation;
  float* parts;  // [clusters, rows, width]
};

// The pieces of weights of one group, in the order in which they go round its ring: of the first layer every third
// k_tile of x, each with all tiles; then of the second layer every third tile of y, counted from the other end, so that
// no group has one more of both.
struct Pieces {
  const Plan& plan;
  int rank, cluster, group;

  __device__ static int each_third(int first, int count) { return (count - first + kGroups - 1) / kGroups; }
  __device__ int first_tile() const { return kGroups - 1 - group; }
  __device__ int first_layer() const { return each_third(group, plan.k_tiles) * kXPieces * plan.tiles; }
  __device__ int tiles_of_y() const {  // of this block: rank, rank + 8, …
    return ((plan.width + kColumns - 1) / kColumns - rank + kCluster - 1) / kCluster;
  }
  __device__ int count() const { return first_layer() + each_third(first_tile(), tiles_of_y()) * plan.slice_pieces; }
  __device__ int column_of_y(int tile) const { return (rank + tile * kCluster) * kColumns; }
  __device__ int inner_column() const { return cluster * plan.slice() + rank * plan.columns; }
  __device__ int stage(int piece) const { return group * plan.stages + piece % plan.stages; }
  __device__ int round(int piece) const { return piece / plan.stages; }
};

// By one thread.
template <Major kWeight, class T>
__device__ __forceinline__ void issue_piece_load(InnerShared<T>& shared, const Pieces& pieces, int piece,
                                                 const CUtensorMap* map_1, const CUtensorMap* map_2) {
  const Plan& plan = pieces.plan;
  const int stage = pieces.stage(piece), of_second = piece - pieces.first_layer();
  const bool first = of_second < 0;
  const CUtensorMap* const map = first ? map_1 : map_2;
  int column, k;
  if (first) {
    const int of_x = piece / plan.tiles;
    column = pieces.inner_column() + piece % plan.tiles * kColumns;
    k = (pieces.group + of_x / kXPieces * kGroups) * kXDeep + of_x % kXPieces * kDeep;
  } else {
    column = pieces.column_of_y(pieces.first_tile() + of_second / plan.slice_pieces * kGroups);
    k = pieces.cluster * plan.slice() + of_second % plan.slice_pieces * kDeep;
  }
  mbarrier_arrive_expect_tx(&shared.full[stage], sizeof shared.memory[0]);
  if constexpr (kWeight == Major::kMN) {
    tma_load(shared.memory[stage], map, &shared.full[stage], column, k);
  } else {
#pragma unroll
    for (int at = 0; at < kDeep; at += kBox) {
      tma_load(shared.memory[stage] + at * kColumns, map, &shared.full[stage], k + at, column);
    }
  }
}

// sum += a · b: 64 rows by kColumns, so many boxes deep.
template <Major kWeight, class T>
__device__ __forceinline__ void multiply_piece(float (&sum)[kColumns / 2], const T* a, const T* b, int boxes) {
  constexpr bool kAlong = kWeight == Major::kK;
  uint64_t of_a = matrix_descriptor(a, 0, 1024, Swizzle::k128);
  uint64_t of_b = matrix_descriptor(b, 0, kAlong ? 1024 : 512, kAlong ? Swizzle::k128 : Swizzle::k64);
  for (int box = 0; box < boxes; ++box) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBox / 16; ++k) {  // descriptors count in 16 bytes
      wgmma<kColumns, T, Major::kK, kWeight>(sum, of_a + k * (32 >> 4),
                                             of_b + k * ((kAlong ? 32 : 16 * kColumns * 2) >> 4), true);
    }
    wgmma_commit();
    of_a += kBox * kMostRows * 2 >> 4, of_b += kBox * kColumns * 2 >> 4;
  }
  wgmma_wait<0>();
}

// Calls f(row, column, i) for each two neighbours of a warpgroup's sums, i and i + 1.
template <class F>
__device__ __forceinline__ void for_each_pair(F f) {
  const int lane = threadIdx.x % kWarpSize, row = static_cast<int>(threadIdx.x / kWarpSize) % 4 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < kColumns / 2; i += 2) f(row + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2, i);
}

// By a warpgroup: the first layer's block, and then the cluster's part of the block's columns of y.
template <Major kWeight, class T>
__device__ __forceinline__ void multiply_both(InnerShared<T>& shared, const Pieces& pieces, const InnerArgs<T>& args) {
  const Plan& plan = args.plan;
  const int group = pieces.group, lane = threadIdx.x % kWarpSize;
  int piece = 0;
  const auto multiply_next = [&](float (&sum)[kColumns / 2], const T* a, int boxes) {
    const int stage = pieces.stage(piece);
    mbarrier_wait(&shared.full[stage], pieces.round(piece) % 2);
    multiply_piece<kWeight>(sum, a, shared.memory[stage], boxes);
    if (lane == 0) mbarrier_arrive(&shared.empty[stage]);
    ++piece;
  };

  float sum[kTiles][kColumns / 2] = {};
  for (int k_tile = group; k_tile < plan.k_tiles; k_tile += kGroups) {
    mbarrier_wait_cluster(&shared.x_full[group], k_tile / kGroups % 2);
    for (int i = 0; i < kXPieces; ++i) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        if (tile < plan.tiles) multiply_next(sum[tile], shared.x[group] + i * kDeep * kMostRows, kDeep / kBox);
      }
    }
    // Not after the last one, which nobody waits for: that block may have ended.
    if (k_tile + kGroups < plan.k_tiles && lane < kCluster) mbarrier_arrive_remote_cta(&shared.x_empty[group], lane);
  }

  const auto sums_of = [&](int of_group) { return reinterpret_cast<float*>(shared.x[of_group]); };
  named_barrier_sync(1 + group, kWarpgroupSize);  // all its warps have read its stage of x
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    if (tile >= plan.tiles) break;
    for_each_pair([&](int row, int column, int i) {
      if (row >= plan.rows) return;
      store_vector<2>(sums_of(group) + row * kSumStride + tile * kColumns + column,
                      Vector<float, 2>{{sum[tile][i], sum[tile][i + 1]}});
    });
  }
  named_barrier_sync(1 + kGroups, kMultipliers);  // all sums are there

  T* const activation = shared.memory[kGroups * plan.stages];
  const int across = plan.columns / 8;
  for (int v = threadIdx.x; v < plan.rows * across; v += kMultipliers) {
    const int row = v / across, eight = v % across, column = pieces.inner_column() + eight * 8;
    float total[8] = {};
#pragma unroll
    for (int of_group = 0; of_group < kGroups; ++of_group) {
      const auto part = load_vector<8>(sums_of(of_group) + row * kSumStride + eight * 8);
#pragma unroll
      for (int j = 0; j < 8; ++j) total[j] += part.element[j];
    }
    float bias[8];
    widen(shared.bias[eight], bias);
#pragma unroll
    for (int j = 0; j < 8; ++j) total[j] += bias[j];
    const Packed<T> product = packed<T>(total);
    if (args.preactivation.data != nullptr && args.preactivation.has(row, column)) {
      args.preactivation.store(row, column, product);
    }
    widen(product, total);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      total[j] = args.tanh ? gelu_in_epilogue<T, true, false>(total[j]) : gelu_in_epilogue<T, false, false>(total[j]);
    }
    const Packed<T> value = packed<T>(total);
    const int chunk = pieces.rank * across + eight;  // of 16 bytes, in the slice's row; swizzled as TMA would do it
    T* const own = activation + chunk / 8 * kBox * kMostRows + row * kBox + (chunk % 8 ^ row % 8) * 8;
#pragma unroll
    for (int to = 0; to < kCluster; ++to) {
      store_remote_async(remote_address(own, to), value.word, remote_address(&shared.activation_full, to));
    }
  }

  mbarrier_wait_cluster(&shared.activation_full, 0);
  tma_store_fence();  // threads wrote it, wgmma reads it
  for (int tile = pieces.first_tile(); tile < pieces.tiles_of_y(); tile += kGroups) {
    float part[kColumns / 2] = {};
    for (int k = 0; k < plan.slice(); k += kDeep) {
      multiply_next(part, activation + k * kMostRows, min(kDeep, plan.slice() - k) / kBox);
    }
    for_each_pair([&](int row, int column, int i) {
      column += pieces.column_of_y(tile);
      if (row >= plan.rows || column >= plan.width) return;
      store_vector<2>(args.parts + (int64_t{pieces.cluster} * plan.rows + row) * plan.width + column,
                      Vector<float, 2>{{part[i], part[i + 1]}});
    });
  }
}

// Eight neighbours of each of `count` parts, in their order. All of GPT-2's are asked for before the first is needed.
__device__ __forceinline__ void add_parts(float (&total)[8], const float* parts, int count, int64_t distance) {
  constexpr int kAtOnce = 16;
  for (int first = 0; first < count; first += kAtOnce) {
    float4 part[kAtOnce][2] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= count) break;
      const auto* const from = reinterpret_cast<const float4*>(parts + (first + i) * distance);
      part[i][0] = __ldcg(from), part[i][1] = __ldcg(from + 1);  // another kernel's: past the L1 cache
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const auto& [low, high] = part[i];
      total[0] += low.x, total[1] += low.y, total[2] += low.z, total[3] += low.w;
      total[4] += high.x, total[5] += high.y, total[6] += high.z, total[7] += high.w;
    }
  }
}

// ---- on the host ----

// 32 inner columns a block, or so many more that all clusters fit at once, as far as there is room for them.
inline Plan plan_of(const Args& a, int64_t at_once) {
  Plan plan{};
  plan.rows = static_cast<int>(a.rows), plan.width = static_cast<int>(a.width);
  const int64_t fair = ceil_div(ceil_div(a.inner, std::max<int64_t>(at_once, 1) * kCluster), 8) * 8;
  plan.columns = static_cast<int>(std::clamp<int64_t>(fair, kColumns, kTiles * kColumns));
  plan.clusters = static_cast<int>(ceil_div(a.inner, plan.slice()));
  plan.tiles = static_cast<int>(ceil_div(plan.columns, kColumns));
  plan.k_tiles = static_cast<int>(ceil_div(a.width, kXDeep));
  plan.slice_pieces = static_cast<int>(ceil_div(plan.slice(), kDeep));
  plan.stages = (kStages - static_cast<int>(ceil_div(plan.slice() * kMostRows, kPiece))) / kGroups;
  plan.x_rows = static_cast<int>(ceil_div(a.rows, 16)) * 16;
  return plan;
}

// A piece of a weight, or, where its depth lies along its rows, a box of the piece.
template <class T>
CUtensorMap map_of_pieces(const void* weight, Major major, int64_t width, int64_t depth) {
  const bool along = major == Major::kK;
  const auto inner = static_cast<uint64_t>(along ? depth : width), outer = static_cast<uint64_t>(along ? width : depth);
  const auto box = along ? std::array<uint32_t, 2>{kBox, kColumns} : std::array<uint32_t, 2>{kColumns, kDeep};
  return make_tensor_map<T, 2>(static_cast<const T*>(weight), {inner, outer}, {inner * sizeof(T)}, box,
                               along ? Swizzle::k128 : Swizzle::k64);
}

}  // namespace kf::KF_BACKEND::mlp
