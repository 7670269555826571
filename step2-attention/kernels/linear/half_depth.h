// A tile of 64 rows whose depth two warpgroups share: the producer's part, a consumer's, and what they do at the end.
#pragma once

#include <step2/hopper_epilogue.h>
#include <step2/hopper_mainloop.h>

namespace kf::KF_BACKEND::linear {

constexpr int kSplitRows = 64, kConsumers = hopper::kConsumers;
constexpr int kGroup = 8;  // columns, of which each of four neighbouring lanes has two
constexpr int kConsumerThreads = kConsumers * kWarpgroupSize;
enum Barrier { kMultiplied = 1, kGiven = 2 };

template <int kColumns, Major kMajorX, Major kMajorWeight>
struct SplitTile : hopper::Tile<kColumns, kMajorX, kMajorWeight, 1> {
  static constexpr int kStages = kColumns == 64 ? 12 : kColumns == 128 ? 8 : kColumns == 192 ? 6 : 4;
  // So a stage is always the same consumer's. Who waits for a phase by its parity must have waited for the one before.
  static_assert(kStages % kConsumers == 0);
  static constexpr int kStageBytes = (kSplitRows + kColumns) * hopper::kDepth * 2;
};

template <class Tile, class T>
struct SplitShared {
  T x[Tile::kStages][kSplitRows * hopper::kDepth];
  T weight[Tile::kStages][Tile::kWidth * hopper::kDepth];
  T bias[Tile::kWidth];
  Pipeline<Tile::kStages> pipe;
};

// Where the stages were. given: the sums that a consumer passes on, four of each thread in a group.
template <class Tile, class T>
struct EpilogueStorage {
  static constexpr int kHalf = Tile::kWidth / kGroup / 2;  // groups that a consumer finishes
  static constexpr int kStride = kHalf * kGroup + 8;       // padding against bank conflicts
  float given[kConsumers][kHalf][kWarpgroupSize][4];
  T outputs[kConsumers][kWarpgroupSize / kWarpSize][16][kStride];
};

// By one thread: loads all stages of the tile that begins there.
template <class Tile, class T>
__device__ void issue_all_loads(SplitShared<Tile, T>& shared, const CUtensorMap* map_x, const CUtensorMap* map_weight,
                                int row, int column, int k_tiles) {
  PipelineState<Tile::kStages> ring;
  for (int k_tile = 0; k_tile < k_tiles; ++k_tile, ring.advance()) {
    uint64_t* const full = &shared.pipe.full[ring.index];
    shared.pipe.producer_acquire(ring, Tile::kStageBytes);
    const auto load = [&](T* to, const CUtensorMap* map, Major major, int across) {
      const int k = k_tile * hopper::kDepth;
      major == Major::kK ? tma_load(to, map, full, k, across) : tma_load(to, map, full, across, k);
    };
    load(shared.x[ring.index], map_x, Tile::kA, row);
    constexpr int kBox = Tile::kB == Major::kK ? Tile::kWidth : 64;
#pragma unroll
    for (int c = 0; c < Tile::kWidth; c += kBox) {
      load(shared.weight[ring.index] + c * hopper::kDepth, map_weight, Tile::kB, column + c);
    }
  }
}

// Consumer 0 multiplies stages 0, 2, 4 …, consumer 1 the others.
template <class Tile, class T>
__device__ __forceinline__ void multiply_half(float (&sum)[Tile::kWidth / 2], SplitShared<Tile, T>& shared, int number,
                                              int k_tiles) {
  const bool leader = leads_warpgroup(number);
  int in_use = -1;  // the stage that the product in flight reads
  PipelineState<Tile::kStages> ring;
  if (number == 1) ring.advance();
  for (int k_tile = number; k_tile < k_tiles; k_tile += kConsumers) {
    shared.pipe.consumer_wait(ring);
    hopper::multiply<Tile>(sum, shared.x[ring.index], shared.weight[ring.index], true);
    wgmma_wait<1>();
    if (leader && in_use >= 0) shared.pipe.consumer_release(in_use);
    in_use = ring.index;
    ring.advance();
    ring.advance();
  }
  wgmma_wait<0>();
  named_barrier_sync(kMultiplied, kConsumerThreads);  // nobody reads a stage any more
}

// Consumer 0 finishes the first half of the columns, consumer 1 the second. Each gives the other one the sums of its
// half, and keeps those of its own, which then are sum's first half.
template <class Tile, class T>
__device__ __forceinline__ void exchange_halves(float (&sum)[Tile::kWidth / 2], EpilogueStorage<Tile, T>& epilogue,
                                                int number) {
  constexpr int kHalf = EpilogueStorage<Tile, T>::kHalf;
#pragma unroll
  for (int group = 0; group < kHalf; ++group) {
    Vector<float, 4> four;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float &first = sum[4 * group + j], &second = sum[4 * (kHalf + group) + j];
      four.element[j] = number == 0 ? second : first;
      first = number == 0 ? first : second;
    }
    store_vector<4>(epilogue.given[number][group][threadIdx.x % kWarpgroupSize], four);
  }
}

// Adds up both, and the bias, and stores. Each warp's outputs go through shared memory, so that a lane has eight
// neighbours of a row. row and column: where the tile begins.
template <class Tile, class T>
__device__ __forceinline__ void store_half(const float (&sum)[Tile::kWidth / 2], EpilogueStorage<Tile, T>& epilogue,
                                           const T* bias, const Rows<T>& y, int number, int64_t row, int64_t column) {
  constexpr int kHalf = EpilogueStorage<Tile, T>::kHalf;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroupSize, lane = thread % kWarpSize;
  const int warp = thread / kWarpSize;
  auto& outputs = epilogue.outputs[number][warp];
#pragma unroll
  for (int group = 0; group < kHalf; group += 2) {
    uint32_t pair[4];  // of a group rows g and g + 8, then the same of the next group
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto more = load_vector<4>(epilogue.given[1 - number][group + i][thread]);
      const float* const own = sum + 4 * (group + i);
      float b[2];
      widen(load_vector<2>(bias + (number * kHalf + group + i) * kGroup + lane % 4 * 2), b);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        pair[2 * i + half] = pack<T>(own[2 * half] + more.element[2 * half] + b[0],
                                     own[2 * half + 1] + more.element[2 * half + 1] + b[1]);
      }
    }
    stmatrix(outputs[lane % 16] + (group + lane / 16) * kGroup, pair);
  }
  __syncwarp();
  row += warp * 16, column += number * kHalf * kGroup;
#pragma unroll
  for (int v = lane; v < 16 * kHalf; v += kWarpSize) {
    const int r = v / kHalf, c = v % kHalf * kGroup;
    if (y.has(row + r, column + c)) y.store(row + r, column + c, load_packed(outputs[r] + c));
  }
}

}  // namespace kf::KF_BACKEND::linear
