// A product of few rows on Hopper, and what follows it: what it waits for is its operands' way to the multiprocessors.
//
// A tile is 64 columns, and 64 or 128 rows. The blocks of a cluster share out its depth, and send their sums to each
// other: each adds up some of the rows, in the order of the parts, and finishes them.
#pragma once

#include <step2/dependent_launch.h>
#include <step2/hopper_mainloop.h>

#include <algorithm>
#include <string>

namespace kf::KF_BACKEND::few_rows {

constexpr int kColumns = 64, kStages = 6, kMostBlocks = 16;
constexpr int kSetRows = 16;           // a set: the rows of which a warp has the sums
constexpr int kStride = kColumns + 8;  // of sums in shared memory: padding against bank conflicts

template <int kGroups, class T>
struct Shared {
  static constexpr int kRows = kGroups * 64, kSets = kRows / kSetRows, kThreads = kGroups * kWarpgroupSize;
  T x[kStages][kRows * hopper::kDepth];
  T weight[kStages][kColumns * hopper::kDepth];
  float sums[kMostBlocks][kSetRows * kStride];  // [part of the depth][set that this block adds up]
  uint64_t full[kStages], arrived;
};

// How a cluster shares a tile's depth of `k_tiles` stages: in `parts`, each of up to `each`.
struct Share {
  int k_tiles, parts, each;
};

template <int kGroups, Major kWeight, class T, class E>
__global__ void __launch_bounds__(kGroups* kWarpgroupSize)
    few_rows_kernel(const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_weight,
                    const Rows<T> bias, const E epilogue, const Share share) {
  using S = Shared<kGroups, T>;
  launch_dependent_grids();  // it waits for the end of this one
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<S*>(memory);
  const int parts = share.parts, part = static_cast<int>(cluster_rank_of_block());
  const int row = static_cast<int>(blockIdx.y) * S::kRows, column = static_cast<int>(blockIdx.x) / parts * kColumns;
  const int first = part * share.each, k_tiles = min(share.each, share.k_tiles - first);
  // Set s of the rows is added up by the block of part s % parts, as its set s / parts.
  const auto sets_of = [&](int of_part) { return (S::kSets - of_part + parts - 1) / parts; };
  const auto rows_of = [&](int set) {
    return static_cast<int>(max(min(epilogue.out.rows - row - set * kSetRows, int64_t{kSetRows}), int64_t{0}));
  };
  const int sets = sets_of(part);

  if (threadIdx.x == 0) {
    tma_prefetch_map(&map_x);
    for (uint64_t& full : shared.full) mbarrier_init(&full, 1);
    mbarrier_init(&shared.arrived, 1);
    mbarrier_init_fence();
    int rows = 0;
    for (int set = part; set < S::kSets; set += parts) rows += rows_of(set);
    mbarrier_arrive_expect_tx(&shared.arrived, (parts - 1) * rows * kColumns * static_cast<int>(sizeof(float)));
    for (int stage = 0; stage < k_tiles; ++stage) {
      const int k = (first + stage) * hopper::kDepth;
      mbarrier_arrive_expect_tx(&shared.full[stage], sizeof shared.x[0] + sizeof shared.weight[0]);
      tma_prefetch(&map_weight, kWeight == Major::kK ? k : column, kWeight == Major::kK ? column : k);
    }
  }
  __syncthreads();
  cluster_barrier_arrive_relaxed();
  cluster_barrier_wait();     // all blocks' barriers are there: sums may be sent
  wait_on_dependent_grids();  // and x is there
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < k_tiles; ++stage) {
      const int k = (first + stage) * hopper::kDepth;
      uint64_t* const full = &shared.full[stage];
      tma_load(shared.x[stage], &map_x, full, k, row);
      tma_load(shared.weight[stage], &map_weight, full, kWeight == Major::kK ? k : column,
               kWeight == Major::kK ? column : k);
    }
  }

  // A thread finishes eight neighbours of up to four rows. What the epilogue reads there is asked for now.
  constexpr int kAcross = kColumns / 8, kPasses = S::kSets * kSetRows * kAcross / S::kThreads;
  const int own_column = column + static_cast<int>(threadIdx.x) % kAcross * 8;
  const auto set_of = [&](int pass) {
    return (pass * S::kThreads + static_cast<int>(threadIdx.x)) / kAcross / kSetRows;
  };
  const int row_of_set = static_cast<int>(threadIdx.x) / kAcross % kSetRows;
  const auto row_of = [&](int pass) { return row + (set_of(pass) * parts + part) * kSetRows + row_of_set; };
  Packed<T> of_bias, ahead[kPasses];
  if (bias.data != nullptr && bias.has(0, own_column)) of_bias = bias.load(0, own_column);
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    if (set_of(pass) < sets) ahead[pass] = read_ahead(epilogue, row_of(pass), own_column);
  }

  float sum[kColumns / 2];
  const T* const x = shared.x[0] + threadIdx.x / kWarpgroupSize * 64 * hopper::kDepth;
  const auto multiply = [&](int stage, bool accumulate) {
    mbarrier_wait_warp(&shared.full[stage], 0);
    hopper::multiply<hopper::Tile<kColumns, Major::kK, kWeight, 1>>(sum, x + stage * S::kRows * hopper::kDepth,
                                                                    shared.weight[stage], accumulate);
    wgmma_wait<1>();
  };
  multiply(0, false);
#pragma unroll 1
  for (int stage = 1; stage < k_tiles; ++stage) multiply(stage, true);
  wgmma_wait<0>();

  const int lane = threadIdx.x % kWarpSize, set = threadIdx.x / kWarpSize, owner = set % parts, rows = rows_of(set);
  float* const sums = shared.sums[part * sets_of(owner) + set / parts];
  const uint32_t to = remote_address(sums, owner), arrived = remote_address(&shared.arrived, owner);
  // Of two neighbouring lanes, which have two columns each of two rows, one gets four of the upper row, one of the
  // lower.
  const bool lower = lane % 2 == 1;
  const int r = lane / 4 + (lower ? 8 : 0);
#pragma unroll
  for (int i = 0; i < kColumns / 2; i += 4) {
    const float first_of_other = __shfl_xor_sync(kFullWarp, lower ? sum[i] : sum[i + 2], 1);
    const float second_of_other = __shfl_xor_sync(kFullWarp, lower ? sum[i + 1] : sum[i + 3], 1);
    const Vector<float, 4> four = lower ? Vector<float, 4>{{first_of_other, second_of_other, sum[i + 2], sum[i + 3]}}
                                        : Vector<float, 4>{{sum[i], sum[i + 1], first_of_other, second_of_other}};
    const int at = r * kStride + 2 * i + lane % 4 / 2 * 4;
    if (r >= rows) continue;
    if (owner == part) {
      store_vector<4>(sums + at, four);
    } else {
      store_remote_async(to + at * static_cast<uint32_t>(sizeof(float)),
                         reinterpret_cast<const uint32_t (&)[4]>(four.element), arrived);
    }
  }
  __syncthreads();                            // this block's own sums are there
  mbarrier_wait_cluster(&shared.arrived, 0);  // and the others'; nobody reaches into this block any more

  float of_column[8];
  widen(of_bias, of_column);
  Packed<T> value[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    if (set_of(pass) >= sets) break;
    float total[8] = {};
    for (int from = 0; from < parts; ++from) {
      const float* const eight = shared.sums[from * sets + set_of(pass)] + row_of_set * kStride + own_column - column;
      const auto low = load_vector<4>(eight), high = load_vector<4>(eight + 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) total[j] += low.element[j], total[4 + j] += high.element[j];
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) total[j] += of_column[j];
    value[pass] = packed<T>(total);
  }
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    if (set_of(pass) >= sets) break;
    apply_epilogue(epilogue, row_of(pass), own_column, value[pass], ahead[pass]);
  }
}

// ---- on the host ----

constexpr int64_t kMostDepth = int64_t{kMostBlocks} * kStages * hopper::kDepth;

// Why this cannot be done, or "".
inline std::string can_implement(const Product& p, Major weight, DType dtype) {
  const std::string why_not = hopper::can_implement_product(p, Major::kK, weight, dtype);
  if (!why_not.empty()) return why_not;
  if (p.depth > kMostDepth) return "takes a depth ≤ " + std::to_string(kMostDepth) + ", got " + std::to_string(p.depth);
  if (p.rows <= 128 * 65535) return "";
  return "takes rows ≤ " + std::to_string(128 * 65535) + ", got " + std::to_string(p.rows);
}

// As many parts of the depth as give each multiprocessor a block; at the most eight, if these are enough.
inline Share share_of(const Product& p, int64_t tile_rows) {
  const int64_t k_tiles = ceil_div(p.depth, hopper::kDepth), least = ceil_div(k_tiles, kStages);
  const int64_t wanted = multiprocessors() / (ceil_div(p.width, kColumns) * ceil_div(p.rows, tile_rows));
  const int64_t each = ceil_div(k_tiles, std::clamp<int64_t>(wanted, least, std::max<int64_t>(least, 8)));
  return {static_cast<int>(k_tiles), static_cast<int>(ceil_div(k_tiles, each)), static_cast<int>(each)};
}

template <int kGroups, Major kWeight, class T, class E>
void launch_groups(const Product& p, const E& epilogue, void* stream) {
  using S = Shared<kGroups, T>;
  const int64_t down = ceil_div(p.rows, S::kRows);
  const Share share = share_of(p, S::kRows);
  const CUtensorMap map_x = hopper::map_of<T>(p.a, Major::kK, p.rows, p.depth, S::kRows, hopper::kDepth);
  const CUtensorMap map_weight = hopper::map_of<T>(p.b, kWeight, p.width, p.depth, kColumns, hopper::kDepth);
  launch_dependent_in_clusters(
      few_rows_kernel<kGroups, kWeight, T, E>, share.parts,
      dim3(static_cast<unsigned>(ceil_div(p.width, kColumns) * share.parts), static_cast<unsigned>(down)), S::kThreads,
      sizeof(S), stream, map_x, map_weight, Rows<T>(p.bias, 1, p.width), epilogue, share);
}

// out = a · b + bias, and the epilogue of step2/product.h; a's rows lie as they are, b as kWeight says. Tiles have 64
// rows where all blocks of such fit at once: these are done earlier, but the weight is read once for each 64 rows.
template <Major kWeight, class T, class E>
void launch(const Product& p, const E& epilogue, void* stream) {
  const int64_t blocks =
      ceil_div(p.rows, 64) * ceil_div(p.width, kColumns) * ceil_div(p.depth, kStages * hopper::kDepth);
  p.rows <= 64 || blocks <= multiprocessors() ? launch_groups<1, kWeight, T>(p, epilogue, stream)
                                              : launch_groups<2, kWeight, T>(p, epilogue, stream);
}

}  // namespace kf::KF_BACKEND::few_rows
