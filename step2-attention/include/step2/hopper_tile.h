// A product of matrices of half types on Hopper, cut up: the tiles, the stages that their operands come in, and which
// block takes which tile when.
#pragma once

#include <kf/launch.h>
#include <step2/product.h>
#include <step2/tensor_map.h>
#include <step2/warpgroup.h>

#include <algorithm>
#include <string>

namespace kf::KF_BACKEND::hopper {

constexpr int kDepth = 64;  // of a stage: 128 bytes, the widest row that TMA and wgmma can swizzle
constexpr int kConsumers = 2;
constexpr int kRows = kConsumers * 64;  // of a tile
constexpr int kThreads = (kConsumers + 1) * kWarpgroupSize;
constexpr int kSlice = 64;     // columns that lie together, where sums wait: 128 bytes
constexpr int kWarpRows = 16;  // of a consumer's 64, as wgmma leaves them

template <int kColumns, Major kMajorA, Major kMajorB, int kClusterBlocks,
          int kRing = kColumns >= 192   ? 4
                      : kColumns == 128 ? 6
                                        : 8>
struct Tile {
  static constexpr int kWidth = kColumns;
  static constexpr Major kA = kMajorA, kB = kMajorB;
  static constexpr int kBlocks = kClusterBlocks;
  static constexpr int kStages = kRing;
  static constexpr int kStageBytes = (kRows + kColumns) * kDepth * 2;
  static constexpr int kSlices = kColumns / kSlice;
};

template <class Tile, class T>
struct Stages {
  using Element = T;
  T a[Tile::kStages][kRows * kDepth];
  T b[Tile::kStages][Tile::kWidth * kDepth];
};

// Which tile a cluster takes when. Neighbours in time share rows of a or columns of b, so that the L2 cache serves
// both: they go down kGroup tiles, then one to the right.
struct Schedule {
  static constexpr int kGroup = 8;
  int down, right;  // tiles of a cluster in each direction
  int k_tiles;      // stages along the depth

  __host__ __device__ int count() const { return down * right; }

  struct Work {
    int row, column;  // in tiles of a cluster
  };
  __device__ Work find(int number) const {
    const int group = number / (kGroup * right), first = group * kGroup;
    const int rows = min(kGroup, down - first), within = number - first * right;
    return {first + within % rows, within / rows};
  }
};

// ---- on the host ----

// Why this cannot be done, or "".
inline std::string can_implement_product(const Product& p, Major a, Major b, DType dtype) {
  if (dtype != DType::kFloat16 && dtype != DType::kBFloat16) return "takes float16 or bfloat16";
  if (compute_capability() != 90) return "needs a GPU of compute capability 9.0";
  if (std::max({p.rows, p.depth, p.width}) > INT32_MAX / 2) return "takes rows, depth and width below 2³⁰";
  return can_implement_operands(p, a, b, dtype);
}

struct Maps {
  CUtensorMap a, b;
};

// `across`: the dimension of the operand that is not the depth.
template <class T>
CUtensorMap map_of(const void* data, Major major, int64_t across, int64_t depth, int box_across, int box_depth) {
  const bool along = major == Major::kK;
  const auto inner = static_cast<uint64_t>(along ? depth : across),
             outer = static_cast<uint64_t>(along ? across : depth);
  return make_tensor_map<T, 2>(static_cast<const T*>(data), {inner, outer}, {inner * sizeof(T)},
                               {64, static_cast<uint32_t>(along ? box_across : box_depth)}, Swizzle::k128);
}

template <class Tile, class T>
Maps maps_of(const Product& p) {
  return {map_of<T>(p.a, Tile::kA, p.rows, p.depth, kRows, kDepth),
          map_of<T>(p.b, Tile::kB, p.width, p.depth, Tile::kWidth / Tile::kBlocks, kDepth / Tile::kBlocks)};
}

template <class Tile>
Schedule schedule_of(const Product& p) {
  return {static_cast<int>(ceil_div(p.rows, kRows * Tile::kBlocks)), static_cast<int>(ceil_div(p.width, Tile::kWidth)),
          static_cast<int>(ceil_div(p.depth, kDepth))};
}

// What a multiprocessor, or a cluster of them, has to do at most, in columns of 128 rows; and what a tile costs
// besides. With tiles of 64 columns a consumer reads 128 lines of shared memory for 64 × 64 outputs, all that it
// delivers: they count as 96.
inline int64_t busiest(const Product& p, int64_t width, int64_t blocks) {
  const int64_t tiles = ceil_div(p.rows, kRows * blocks) * ceil_div(p.width, width);
  return ceil_div(tiles, multiprocessors() / blocks) * ((width == 64 ? 96 : width) + 16);
}

// Calls f with the width of tiles, as a constant, that leaves the fewest multiprocessors idle: wide tiles read least,
// but there are few of them.
template <int kBlocks, class F>
void with_tile_width(const Product& p, F&& f) {
  const int64_t of_256 = busiest(p, 256, kBlocks), of_192 = busiest(p, 192, kBlocks), of_128 = busiest(p, 128, kBlocks);
  if constexpr (kBlocks == 1) {
    if (busiest(p, 64, 1) < std::min({of_256, of_192, of_128})) return f(std::integral_constant<int, 64>{});
  }
  if (of_256 <= of_192 && of_256 <= of_128) return f(std::integral_constant<int, 256>{});
  if (of_192 <= of_128) return f(std::integral_constant<int, 192>{});
  f(std::integral_constant<int, 128>{});
}

}  // namespace kf::KF_BACKEND::hopper
