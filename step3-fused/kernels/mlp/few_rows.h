// A layer with few rows, by blocks that are all resident: as linear's v10_rows, but tile after tile, and with the first
// weights in flight before x is there.
#pragma once

#include <step2/cluster.h>
#include <step2/hopper_product.h>

namespace kf::KF_BACKEND::mlp {

constexpr int kTile = 64, kStages = 6, kCluster = 8;
constexpr int kStride = kTile + 4;  // of the sums in shared memory: padding against bank conflicts

template <class T>
struct Shared {
  T x[kStages][kTile * hopper::kDepth];
  T weight[kStages][kTile * hopper::kDepth];
  float sums[kTile * kStride];
  uint64_t full[kStages];
};

// How the blocks share a layer: `group` neighbours the depth of a tile, `each` of its `k_tiles`. In a round each group
// has a tile; in the last one some may have none.
struct Share {
  int tiles, k_tiles, group, each, rounds;
};

// A layer's operands and how they are shared.
template <class T>
struct LayerOf {
  const CUtensorMap *x, *weight;
  const T* bias;
  int width;
  Share share;
};

template <Major kWeight, class T>
struct Multiplier {
  Shared<T>& shared;
  const LayerOf<T> layer;
  int rank, groups, k_tiles, done;  // of its group; how many there are; its share of k_tiles; that of the layer before

  __device__ Multiplier(Shared<T>& shared, const LayerOf<T>& layer, int done)
      : shared(shared),
        layer(layer),
        rank(static_cast<int>(cluster_rank_of_block()) % layer.share.group),
        groups(static_cast<int>(gridDim.x) / layer.share.group),
        k_tiles(max(min(layer.share.each, layer.share.k_tiles - rank * layer.share.each), 0)),
        done(done) {}

  __device__ int tile_of(int round) const { return static_cast<int>(blockIdx.x) / layer.share.group + round * groups; }
  __device__ int k_tiles_of(int round) const { return tile_of(round) < layer.share.tiles ? k_tiles : 0; }
  __device__ int k_of(int k_tile) const { return (rank * layer.share.each + k_tile) * hopper::kDepth; }

  // By one thread: the weight of a tile of the depth, and the announcement of what else comes to its stage; then x.
  __device__ void issue_weight_load(int round, int k_tile) const {
    const int stage = (done + k_tile) % kStages, column = tile_of(round) * kTile;
    mbarrier_arrive_expect_tx(&shared.full[stage], sizeof shared.x[0] + sizeof shared.weight[0]);
    tma_load(shared.weight[stage], layer.weight, &shared.full[stage], kWeight == Major::kK ? k_of(k_tile) : column,
             kWeight == Major::kK ? column : k_of(k_tile));
  }
  __device__ void issue_x_load(int k_tile) const {
    const int stage = (done + k_tile) % kStages;
    tma_load(shared.x[stage], layer.x, &shared.full[stage], k_of(k_tile), 0);
  }

  // Before x is there: the weights of the first round's first tiles of the depth.
  __device__ void begin() const {
    for (int k_tile = 0; k_tile < min(k_tiles_of(0), kStages); ++k_tile) issue_weight_load(0, k_tile);
  }

  // All rounds; `epilogue(row, column, sums of eight neighbours)`. The loads of the first weights have been issued by
  // begin.
  template <class Epilogue>
  __device__ __forceinline__ void run(int rows, Epilogue epilogue) {
    for (int round = 0; round < layer.share.rounds; ++round) {
      const int count = k_tiles_of(round);
      if (threadIdx.x == 0) {
        for (int k_tile = 0; k_tile < min(count, kStages); ++k_tile) {
          if (round > 0) issue_weight_load(round, k_tile);
          issue_x_load(k_tile);
        }
      }
      float sum[kTile / 2] = {};  // a block without a tile of the depth adds 0
      for (int k_tile = 0; k_tile < count; ++k_tile) {
        const int stage = (done + k_tile) % kStages;
        mbarrier_wait(&shared.full[stage], (done + k_tile) / kStages % 2);
        hopper::multiply<hopper::Tile<kTile, Major::kK, kWeight, 1>>(sum, shared.x[stage], shared.weight[stage], true);
        wgmma_wait<0>();
        if (k_tile + kStages < count) {
          __syncthreads();  // all have read the stage
          if (threadIdx.x == 0) issue_weight_load(round, k_tile + kStages), issue_x_load(k_tile + kStages);
        }
      }
      done += count;
      add_up(sum, rows, tile_of(round) * kTile, epilogue);
    }
  }

  // The group's parts in their order, eight neighbours a thread.
  template <class Epilogue>
  __device__ __forceinline__ void add_up(const float (&sum)[kTile / 2], int rows, int column, Epilogue epilogue) const {
    const int lane = threadIdx.x % kWarpSize, warp_row = static_cast<int>(threadIdx.x / kWarpSize) * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kTile / 2; i += 2) {
      store_vector<2>(shared.sums + (warp_row + i / 2 % 2 * 8) * kStride + i / 4 * 8 + lane % 4 * 2,
                      Vector<float, 2>{{sum[i], sum[i + 1]}});
    }
    cluster_sync();  // all blocks' sums are there
    const int first = static_cast<int>(cluster_rank_of_block()) - rank;
    for (int v = rank * kWarpgroupSize + threadIdx.x; v < rows * (kTile / 8); v += layer.share.group * kWarpgroupSize) {
      const int r = v / (kTile / 8), c = v % (kTile / 8) * 8;
      float total[8] = {};
      for (int block = 0; block < layer.share.group; ++block) {
        const uint32_t from = remote_address(shared.sums + r * kStride + c, first + block);
        const float4 low = load_remote_4(from), high = load_remote_4(from + 16);
        const float part[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) total[j] += part[j];
      }
#pragma unroll
      for (int j = 0; j < 8; ++j)
        total[j] += column + c + j < layer.width ? to_compute(layer.bias[column + c + j]) : 0.0f;
      epilogue(r, column + c, packed<T>(total));
    }
    cluster_sync();  // nobody reads the sums any more
  }
};

// The sharing with which the busiest block has the fewest k_tiles; of two that are alike, the smaller groups.
inline Share share_of(int64_t width, int64_t depth, int64_t blocks) {
  Share best{};
  int64_t fewest = INT64_MAX;
  for (int64_t group = 1; group <= kCluster; group *= 2) {
    const int64_t tiles = ceil_div(width, kTile), k_tiles = ceil_div(depth, hopper::kDepth);
    const int64_t each = ceil_div(k_tiles, group), rounds = ceil_div(tiles * group, blocks);
    if (each * rounds >= fewest) continue;
    fewest = each * rounds;
    best = {static_cast<int>(tiles), static_cast<int>(k_tiles), static_cast<int>(group), static_cast<int>(each),
            static_cast<int>(rounds)};
  }
  return best;
}

}  // namespace kf::KF_BACKEND::mlp
