// A product of matrices of half types on Hopper: out = a · b, tile by tile, by TMA and wgmma.
//
// A block has three warpgroups. One thread of the first loads tiles of a and b into a ring of stages in shared
// memory; the other two, the consumers, multiply 64 rows each. Blocks stay until all tiles are done, and what follows
// the product, the epilogue, runs under the next tile's product: only the rounded sums wait in registers for it.
//
//   producer     a b a b a b a b a b a b …            the next tile's first stages are full before it begins
//   consumers    │ product of tile 0 │ product of tile 1 │ …
//   the same                         │ epilogue of 0     │ epilogue of 1 …
//
// With kBlocks = 2, two blocks of a cluster take tiles one above the other: they need the same part of b, of which each
// loads half, for both. That is a third less to be read from the L2 cache.
#pragma once

#include <kf/launch.h>
#include <step2/cluster.h>
#include <step2/mbarrier.h>
#include <step2/mma.h>
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

// Full: the tiles have arrived, one arrival and their bytes. Empty: all consumers of the cluster have released them. Of
// one base only, here and below: at another's offset nvcc takes shared memory for any memory, whose loads and stores
// are slower.
template <class Tile, class T>
struct Shared : Stages<Tile, T> {
  uint64_t full[Tile::kStages], empty[Tile::kStages];
};

// A consumer warp's sums go through shared memory in rounds of some slices, swizzled as TMA does it, and a round in
// parts: half of the warp's rows in one slice, of which each lane has two vectors of eight neighbours.
template <int kSlicesARound>
struct Parts {
  // Where the lane's vector i of a part lies, and which row and column of the warp's tile it is.
  static __device__ __forceinline__ int row_of(int part, int i) {
    return part % 2 * 8 + 4 * i + static_cast<int>(threadIdx.x % kWarpSize) / 8;
  }
  static __device__ __forceinline__ int column_of(int part) { return part / 2 * kSlice + threadIdx.x % 8 * 8; }
  static __device__ __forceinline__ int offset_of(int part, int i) {
    const int row = row_of(part, i), slice = part / 2 % kSlicesARound;
    return slice * kWarpRows * kSlice + row * kSlice + (threadIdx.x % 8 ^ row % 8) * 8;
  }
};

template <class Tile, class Epilogue>
constexpr int kSlicesOfStaging = Epilogue::kReads || Epilogue::kWrites ? 1
                                 : Tile::kSlices % 2 != 0              ? Tile::kSlices
                                                                       : 2;

// Where a consumer warp's sums wait, and beside them what its epilogue reads or writes: as many slices a round as there
// is room for.
template <class Tile, class T, class Epilogue>
struct Staging : Parts<kSlicesOfStaging<Tile, Epilogue>> {
  static constexpr bool kOther = Epilogue::kReads || Epilogue::kWrites;
  static constexpr int kOthers = Epilogue::kReads ? 2 : kOther ? 1 : 0;  // what is read is loaded a round ahead
  static constexpr int kSlicesARound = kSlicesOfStaging<Tile, Epilogue>;
  static constexpr int kRounds = Tile::kSlices / kSlicesARound, kPartsARound = kSlicesARound * 2;
  static constexpr int kParts = kRounds * kPartsARound;
  static constexpr int kElements = kSlicesARound * kWarpRows * kSlice;

  T memory[(1 + kOthers) * kElements];

  __device__ __forceinline__ T* sums() { return memory; }
  __device__ __forceinline__ T* other(int round) { return memory + (kOthers == 2 ? 1 + round % 2 : 1) * kElements; }
};

// And the bias of the tile under way and of the next one. Full: it is there. Empty: all consumers have added it.
template <class Tile, class T, class Epilogue>
struct StagedShared : Stages<Tile, T> {
  alignas(1024) Staging<Tile, T, Epilogue> staging[kConsumers * 4];
  alignas(uint32_t) T bias[2][Tile::kWidth];
  alignas(uint64_t) uint64_t bias_full[2], bias_empty[2];
  uint64_t arrived[kConsumers * 4][2];  // what the warp's epilogue reads
  uint64_t full[Tile::kStages], empty[Tile::kStages];
};

// Which tile a cluster takes when. Neighbours in time share rows of a or columns of b, so that the L2 cache serves
// both: they go down kGroup tiles, then one to the right.
struct Schedule {
  static constexpr int kGroup = 8;
  int down, right;  // tiles of a cluster in each direction
  int steps;        // stages along the depth

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

template <int kStages>
struct PipelineState {
  int index = 0;
  int phase = 0;
  __device__ void advance() {
    if (++index == kStages) index = 0, phase ^= 1;
  }
};

// Issues the loads of one stage: by one thread. row and column are the block's own, k is where the depth begins.
template <class Tile, class Shared>
__device__ __forceinline__ void issue_loads(Shared& shared, int stage, const CUtensorMap* map_a,
                                            const CUtensorMap* map_b, int row, int column, int k, int rank) {
  uint64_t* const full = &shared.full[stage];
  if constexpr (Tile::kA == Major::kK) {
    tma_load(shared.a[stage], map_a, full, k, row);
  } else {
#pragma unroll
    for (int i = 0; i < kRows; i += 64) tma_load(shared.a[stage] + i * kDepth, map_a, full, row + i, k);
  }
  const auto load_b = [&](int offset, int x, int y) {
    if constexpr (Tile::kBlocks == 1) {
      tma_load(shared.b[stage] + offset, map_b, full, x, y);
    } else {
      tma_load_multicast(shared.b[stage] + offset, map_b, full, (1 << Tile::kBlocks) - 1, x, y);
    }
  };
  if constexpr (Tile::kB == Major::kK) {  // rows of 64 along the depth: a block of the cluster loads some of them
    constexpr int kOwn = Tile::kWidth / Tile::kBlocks;
    load_b(rank * kOwn * kDepth, k, column + rank * kOwn);
  } else {  // boxes of 64 columns: some rows of each
    constexpr int kOwn = kDepth / Tile::kBlocks;
#pragma unroll
    for (int i = 0; i < Tile::kWidth; i += 64) load_b(i * kDepth + rank * kOwn * 64, column + i, k + rank * kOwn);
  }
}

// Calls f(work) for each work of this block's cluster.
template <class Tile, class F>
__device__ __forceinline__ void for_each_work(const Schedule& schedule, F f) {
  const int clusters = gridDim.x / Tile::kBlocks;
  for (int number = blockIdx.x / Tile::kBlocks; number < schedule.count(); number += clusters) f(schedule.find(number));
}

// By one thread.
template <class Tile, class Shared>
__device__ void produce(Shared& shared, const Schedule& schedule, const CUtensorMap* map_a, const CUtensorMap* map_b,
                        int rank) {
  PipelineState<Tile::kStages> ring;
  for_each_work<Tile>(schedule, [&](const Schedule::Work& work) {
    const int row = (work.row * Tile::kBlocks + rank) * kRows, column = work.column * Tile::kWidth;
    for (int k = 0; k < schedule.steps; ++k, ring.advance()) {
      mbarrier_wait(&shared.empty[ring.index], ring.phase ^ 1);
      mbarrier_arrive_expect_tx(&shared.full[ring.index], Tile::kStageBytes);
      issue_loads<Tile>(shared, ring.index, map_a, map_b, row, column, k * kDepth, rank);
    }
  });
}

// Issues sum += a · b for one stage and a consumer's 64 rows, and closes the group.
template <class Tile, class T>
__device__ __forceinline__ void multiply(float (&sum)[Tile::kWidth / 2], const T* a, const T* b, bool accumulate) {
  // Descriptors count in 16 bytes: the next 16 of the depth, see step2/wgmma.h.
  constexpr int kNextA = Tile::kA == Major::kK ? 32 >> 4 : 2048 >> 4;
  constexpr int kNextB = Tile::kB == Major::kK ? 32 >> 4 : 2048 >> 4;
  const uint64_t of_a = matrix_descriptor(a, 0, 1024, Swizzle::k128);
  const uint64_t of_b = matrix_descriptor(b, Tile::kB == Major::kK ? 0 : 64 * kDepth * 2, 1024, Swizzle::k128);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kDepth / 16; ++i) {
    wgmma<Tile::kWidth, T, Tile::kA, Tile::kB>(sum, of_a + i * kNextA, of_b + i * kNextB, accumulate || i > 0);
  }
  wgmma_commit();
}

// A consumer's sums of a tile, rounded: two neighbours in each register, as wgmma leaves them.
template <class Tile, class T>
struct Rounded {
  uint32_t pair[Tile::kWidth / 4];

  // bias: of the tile's columns, in shared memory. Lane 4g + t has the columns 2t and 2t + 1 of each eight.
  __device__ __forceinline__ void take(const float (&sum)[Tile::kWidth / 2], const T* bias) {
#pragma unroll
    for (int group = 0; group < Tile::kWidth / 8; ++group) {
      float b[2];
      widen(load_vector<2>(bias + group * 8 + threadIdx.x % 4 * 2), b);
      pair[2 * group] = pack<T>(sum[4 * group] + b[0], sum[4 * group + 1] + b[1]);
      pair[2 * group + 1] = pack<T>(sum[4 * group + 2] + b[0], sum[4 * group + 3] + b[1]);
    }
  }

  // Those of one round, of kSlicesARound slices, into the warp's own staging buffer.
  template <int kSlicesARound>
  __device__ __forceinline__ void put(T* staging, int round) const {
    put<kSlicesARound>(staging, round, [](uint32_t (&)[4], const T*) {});
  }

  // The same, where what is to be added lies in the staging buffer: sums come in its place.
  __device__ __forceinline__ void add(T* staging, int round) const {
    put<1>(staging, round, [](uint32_t (&r)[4], const T* there) {
      Packed<T> sums{{r[0], r[1], r[2], r[3]}}, more;
      ldmatrix(more.word, there);
      sums = sum_of(sums, more);
#pragma unroll
      for (int i = 0; i < 4; ++i) r[i] = sums.word[i];
    });
  }

  // The same as `put`; first change(r, address) of each four registers, which stmatrix takes to `address`, this lane's
  // address.
  template <int kSlicesARound, class F>
  __device__ __forceinline__ void put(T* staging, int round, F change) const {
    put_if<kSlicesARound, 0>(staging, round, change);
  }

 private:
  // `pair` must be indexed by constants, or it would be an array in memory.
  template <int kSlicesARound, int kRound, class F>
  __device__ __forceinline__ void put_if(T* staging, int round, F change) const {
    if constexpr (kRound * kSlicesARound < Tile::kSlices) {
      if (round != kRound) return put_if<kSlicesARound, kRound + 1>(staging, round, change);
      constexpr int kFirst = kRound * kSlicesARound * 8;  // eight columns each
      const int lane = threadIdx.x % kWarpSize, row = lane % 16;
#pragma unroll
      for (int group = 0; group < kSlicesARound * 8; group += 2) {
        const uint32_t* const from = pair + 2 * (kFirst + group);
        uint32_t r[4] = {from[0], from[1], from[2], from[3]};
        const int own = group + lane / 16;
        T* const address = staging + own / 8 * kWarpRows * kSlice + row * kSlice + (own % 8 ^ row % 8) * 8;
        change(r, address);
        stmatrix(address, r);
      }
    }
  }
};

// A consumer's way through the ring. `sum` holds its 64 rows, as wgmma leaves them.
template <class Tile, class Shared>
struct Consumer {
  Shared& shared;
  const int number = warpgroup_of_block() - 1;
  const bool leader = leads_warpgroup(number);
  PipelineState<Tile::kStages> ring;
  int reading = -1;  // the stage that the product in flight reads
  float sum[Tile::kWidth / 2];

  __device__ explicit Consumer(Shared& shared) : shared(shared) {}

  // One thread releases the stage in all blocks of the cluster.
  __device__ __forceinline__ void release() {
    if (leader && reading >= 0) {
      if constexpr (Tile::kBlocks == 1) {
        mbarrier_arrive(&shared.empty[reading]);
      } else {
#pragma unroll
        for (int block = 0; block < Tile::kBlocks; ++block) mbarrier_arrive_remote_cta(&shared.empty[reading], block);
      }
    }
    reading = -1;
  }

  // Issues the product of the next stage, and waits for the one before it.
  __device__ __forceinline__ void step(bool accumulate) {
    mbarrier_wait(&shared.full[ring.index], ring.phase);
    multiply<Tile>(sum, shared.a[ring.index] + number * 64 * kDepth, shared.b[ring.index], accumulate);
    wgmma_wait<1>();
    release();
    reading = ring.index;
    ring.advance();
  }

  // After the last step: now `sum` may be read.
  __device__ __forceinline__ void wait() {
    wgmma_wait<0>();
    release();
  }
};

// The maps of what leaves the kernel and of what its epilogue reads and writes besides.
struct EpilogueMaps {
  CUtensorMap out, read, written;
};

// By a warp: the bias of a tile's columns, to shared memory.
template <class Tile, class T>
__device__ __forceinline__ void load_bias(T* to, const T* bias, int column, int width) {
#pragma unroll
  for (int c = threadIdx.x % kWarpSize; c < Tile::kWidth; c += kWarpSize) {
    to[c] = bias != nullptr && column + c < width ? bias[column + c] : from_compute<T>(0.0f);
  }
}

// By one thread: the barriers of the bias, and of what an epilogue reads.
template <class Shared>
__device__ __forceinline__ void init_epilogue(Shared& shared) {
  for (uint64_t& full : shared.bias_full) mbarrier_init(&full, kWarpSize);
  for (uint64_t& empty : shared.bias_empty) mbarrier_init(&empty, kConsumers * kWarpgroupSize);
  for (auto& of_warp : shared.arrived) mbarrier_init(&of_warp[0], 1), mbarrier_init(&of_warp[1], 1);
}

// Brings each tile's bias to shared memory. By a warp of the producer's warpgroup.
template <class Tile, class T, class Shared>
__device__ __forceinline__ void load_biases(Shared& shared, const Schedule& schedule, const T* bias, int width) {
  PipelineState<2> ring;
  for_each_work<Tile>(schedule, [&](const Schedule::Work& work) {
    mbarrier_wait(&shared.bias_empty[ring.index], ring.phase ^ 1);
    load_bias<Tile>(shared.bias[ring.index], bias, work.column * Tile::kWidth, width);
    mbarrier_arrive(&shared.bias_full[ring.index]);
    ring.advance();
  });
}

// What becomes of the sums: they are rounded, after the bias was added, and the epilogue gets them, eight neighbours at
// a time. TMA carries away what is to be written, and brings what is to be read: were it loaded into registers, each
// load would have to arrive before the next product may begin.
template <class T, class Epilogue, template <class Tile, class Shared> class ConsumerOf>
struct RoundThen {
  template <class Tile>
  using Shared = StagedShared<Tile, T, Epilogue>;
  template <class Tile>
  using OneStaging = Staging<Tile, T, Epilogue>;
  static constexpr bool kPlain = std::is_same_v<Epilogue, Store<T>>;

  const T* bias;  // or null
  int width;
  bool by_tma;  // what leaves; if not, element by element: its rows do not begin at multiples of 16 bytes
  Epilogue epilogue;

  template <class Tile>
  __device__ __forceinline__ void init(Shared<Tile>& shared) const {
    init_epilogue(shared);
  }

  template <class Tile>
  __device__ __forceinline__ void prepare(Shared<Tile>& shared, const Schedule& schedule) const {
    load_biases<Tile>(shared, schedule, bias, width);
  }

  template <class Tile>
  __device__ void run(Shared<Tile>& shared, const Schedule& schedule, const EpilogueMaps& maps, int rank) const {
    ConsumerOf<Tile, Shared<Tile>> consumer(shared);
    multiply_all<Tile>(consumer, shared, schedule, maps, rank);
  }

 private:
  // A warp's tile: the first row and column.
  struct Corner {
    int row, column;
  };

  // How far a warp is with the sums that wait.
  template <class Tile>
  struct Waiting {
    Rounded<Tile, T> rounded;
    Corner corner;
    int part = OneStaging<Tile>::kParts;           // the next one; that many: nothing waits
    int round = 0;                                 // rounds done since the kernel began
    int first_round = -OneStaging<Tile>::kRounds;  // the number of this tile's first
    int issued = 0;                                // rounds for which TMA brings what is read
  };

  // Issues the load of what the next round reads, as soon as there is a stage for it: one of the tile that waits, or
  // already of the `next`, which is being multiplied. tiles: 1, where there is no next, else 2.
  template <class Tile>
  __device__ __forceinline__ void issue_load(Waiting<Tile>& w, const Corner& next, int tiles, Shared<Tile>& shared,
                                             const EpilogueMaps& maps) const {
    using Staging = OneStaging<Tile>;
    static_assert(Staging::kSlicesARound == 1, "one box a round");
    const int of_tile = w.issued - w.first_round;
    if (w.issued == w.round + Staging::kOthers || of_tile == tiles * Staging::kRounds) return;
    if (threadIdx.x % kWarpSize == 0) {
      if (Epilogue::kWrites) tma_store_wait_read<0>();  // what was written there has left
      const int warp = threadIdx.x / kWarpSize - 4;
      const bool of_next = of_tile >= Staging::kRounds;
      const int row = of_next ? next.row : w.corner.row, column = of_next ? next.column : w.corner.column;
      uint64_t* const arrived = &shared.arrived[warp][w.issued % 2];
      mbarrier_arrive_expect_tx(arrived, Staging::kElements * sizeof(T));
      tma_load(shared.staging[warp].other(w.issued), &maps.read, arrived, column + of_tile % Staging::kRounds * kSlice,
               row);
    }
    ++w.issued;
  }

  // The next part of what waits; or, where nothing is to be done but to store, the next round.
  template <class Tile>
  __device__ __forceinline__ void advance(Waiting<Tile>& w, Shared<Tile>& shared, const EpilogueMaps& maps) const {
    using Staging = OneStaging<Tile>;
    if (w.part >= Staging::kParts) return;
    const bool leader = threadIdx.x % kWarpSize == 0;
    const int warp = threadIdx.x / kWarpSize - 4, round = w.part / Staging::kPartsARound;
    Staging& staging = shared.staging[warp];
    if (w.part % Staging::kPartsARound == 0) {
      if (leader) tma_store_wait_read<0>();
      __syncwarp();  // nobody reads the staging buffer any more
      w.rounded.template put<Staging::kSlicesARound>(staging.sums(), round);
      __syncwarp();  // and now it is written
      if (Epilogue::kReads) mbarrier_wait_warp(&shared.arrived[warp][w.round % 2], w.round / 2 % 2);
    }
    if (kPlain && by_tma) {
      w.part += Staging::kPartsARound;
    } else {
      finish_part<Tile>(staging, w.corner, w.part++, w.round);
    }
    if (w.part % Staging::kPartsARound == 0) {
      if (by_tma) tma_store_fence();
      __syncwarp();  // the round is written, and TMA may see it
      if (leader && by_tma) store_round<Tile>(staging, maps, w.corner, round, w.round);
      ++w.round;
    }
  }

  template <class Tile>
  __device__ __forceinline__ void finish_part(OneStaging<Tile>& staging, const Corner& corner, int part,
                                              int round) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = corner.row + OneStaging<Tile>::row_of(part, i),
                column = corner.column + OneStaging<Tile>::column_of(part);
      T* const own = staging.sums() + OneStaging<Tile>::offset_of(part, i);
      T* const other_own = staging.other(round) + OneStaging<Tile>::offset_of(part, i);
      Packed<T> value = load_packed(own), other;
      if constexpr (Epilogue::kReads) other = load_packed(other_own);
      epilogue(row, column, value, other);
      if (by_tma) {
        store_packed(own, value);
        if constexpr (Epilogue::kWrites) store_packed(other_own, other);
      } else if (epilogue.out.has(row, column)) {
        epilogue.out.store(row, column, value);
        if constexpr (Epilogue::kWrites) epilogue.written.store(row, column, other);
      }
    }
  }

  template <class Tile>
  __device__ __forceinline__ void store_round(OneStaging<Tile>& staging, const EpilogueMaps& maps, const Corner& corner,
                                              int round, int of_all) const {
#pragma unroll
    for (int slice = 0; slice < OneStaging<Tile>::kSlicesARound; ++slice) {
      const int offset = slice * kWarpRows * kSlice;
      const int column = corner.column + (round * OneStaging<Tile>::kSlicesARound + slice) * kSlice;
      tma_store(&maps.out, staging.sums() + offset, column, corner.row);
      if (Epilogue::kWrites) tma_store(&maps.written, staging.other(of_all) + offset, column, corner.row);
    }
    tma_store_commit();
  }

  template <class Tile, class Multiplier>
  __device__ __forceinline__ void multiply_all(Multiplier& consumer, Shared<Tile>& shared, const Schedule& schedule,
                                               const EpilogueMaps& maps, int rank) const {
    Waiting<Tile> waiting;
    const auto next_part = [&](const Corner& next, int tiles) {
      if constexpr (Epilogue::kReads) issue_load(waiting, next, tiles, shared, maps);
      advance(waiting, shared, maps);
    };
    const int clusters = gridDim.x / Tile::kBlocks;
    int number = blockIdx.x / Tile::kBlocks;
    Schedule::Work next = schedule.find(number);
    PipelineState<2> of_bias;
    while (number < schedule.count()) {
      const Schedule::Work work = next;
      const int row = (work.row * Tile::kBlocks + rank) * kRows + consumer.number * 64;
      const Corner corner{row + static_cast<int>(threadIdx.x) / kWarpSize % 4 * kWarpRows, work.column * Tile::kWidth};
      consumer.step(false);
      number += clusters;
      if (number < schedule.count()) next = schedule.find(number);  // divisions take their time: under a product
      for (int k = 1; k < schedule.steps; ++k) {                    // under a product a part of what waits
        consumer.step(true);
        next_part(corner, 2);
      }
      while (waiting.part < OneStaging<Tile>::kParts) next_part(corner, 2);  // more parts than steps
      consumer.wait();
      mbarrier_wait(&shared.bias_full[of_bias.index], of_bias.phase);
      waiting.rounded.take(consumer.sum, shared.bias[of_bias.index]);
      mbarrier_arrive(&shared.bias_empty[of_bias.index]);
      of_bias.advance();
      waiting.corner = corner, waiting.part = 0, waiting.first_round += OneStaging<Tile>::kRounds;
    }
    while (waiting.part < OneStaging<Tile>::kParts) next_part(waiting.corner, 1);
    if (threadIdx.x % kWarpSize == 0) tma_store_wait_read<0>();  // shared memory must last so long
  }
};

// By one thread.
template <class Tile, class Shared>
__device__ __forceinline__ void init_stages(Shared& shared) {
  for (int stage = 0; stage < Tile::kStages; ++stage) {
    mbarrier_init(&shared.full[stage], 1);
    mbarrier_init(&shared.empty[stage], kConsumers * Tile::kBlocks);
  }
}

template <class Tile, class T, class Finish>
__global__ void __launch_bounds__(kThreads, 1)
    product_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                   const __grid_constant__ EpilogueMaps epilogue_maps, const Schedule schedule, const Finish finish) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Finish::template Shared<Tile>*>(memory);
  const int rank = Tile::kBlocks == 1 ? 0 : static_cast<int>(cluster_rank_of_block());
  if (threadIdx.x == 0) {
    tma_prefetch_map(&map_a);
    tma_prefetch_map(&map_b);
    init_stages<Tile>(shared);
    finish.template init<Tile>(shared);
    mbarrier_init_fence();
  }
  Tile::kBlocks == 1 ? __syncthreads() : cluster_sync();

  if (warpgroup_of_block() == 0) {
    warpgroup_reg_dealloc<40>();
    if (threadIdx.x == 0) produce<Tile>(shared, schedule, &map_a, &map_b, rank);
    if (threadIdx.x / kWarpSize == 1) finish.template prepare<Tile>(shared, schedule);
    __syncwarp();
  } else {
    warpgroup_reg_alloc<232>();
    finish.template run<Tile>(shared, schedule, epilogue_maps, rank);
  }
  if (Tile::kBlocks > 1) cluster_sync();  // no block may end while others still copy into it or arrive at its barriers
}

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

// Of what a warp's rounds write or read.
template <class T>
CUtensorMap map_of_rows(const Rows<T>& rows) {
  return map_of<T>(rows.data, Major::kMN, rows.width, rows.rows, kSlice, kWarpRows);
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

// Why TMA cannot bring the rows that an epilogue reads, or "".
inline std::string can_implement_read(const void* matrix, int64_t width) {
  if (width % 8 != 0) return "takes rows of a multiple of 8 elements, got " + std::to_string(width);
  return aligned_16(matrix) ? "" : "takes matrices that begin at multiples of 16 bytes";
}

// `finish`: what becomes of the sums.
template <class Tile, class T, class Finish>
void launch_with_epilogue(const Product& p, const EpilogueMaps& maps, const Finish& finish, void* stream) {
  const Maps operands = maps_of<Tile, T>(p);
  const Schedule schedule = schedule_of<Tile>(p);
  const int64_t clusters = std::min<int64_t>(schedule.count(), multiprocessors() / Tile::kBlocks);
  const dim3 grid(static_cast<unsigned>(clusters * Tile::kBlocks));
  constexpr int64_t kBytes = sizeof(typename Finish::template Shared<Tile>);
  const auto kernel = product_kernel<Tile, T, Finish>;
  if constexpr (Tile::kBlocks > 1) {
    launch_in_clusters(kernel, Tile::kBlocks, grid, kThreads, kBytes, stream, operands.a, operands.b, maps, schedule,
                       finish);
  } else {
    allow_shared(kernel, kBytes);
    kernel<<<grid, kThreads, kBytes, as_stream(stream)>>>(operands.a, operands.b, maps, schedule, finish);
    check_launch();
  }
}

template <class Tile, class T, template <class, class> class ConsumerOf = Consumer, class E>
void launch_product(const Product& p, const E& epilogue, void* stream) {
  const bool by_tma = epilogue.out.vectors && (!E::kWrites || epilogue.written.vectors);
  EpilogueMaps maps{};
  if (by_tma) maps.out = map_of_rows(epilogue.out);
  if (by_tma && E::kWrites) maps.written = map_of_rows(epilogue.written);
  if constexpr (E::kReads) maps.read = map_of_rows(epilogue.read);
  const RoundThen<T, E, ConsumerOf> finish{static_cast<const T*>(p.bias), static_cast<int>(p.width), by_tma, epilogue};
  launch_with_epilogue<Tile, T>(p, maps, finish, stream);
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

// The same for each Epilogue. Tiles of 256 columns come in clusters of two; with them an epilogue has some
// thirty registers, with tiles of 192, alone, some eighty, and shared memory for what it reads: a heavy epilogue takes
// these.
enum class EpilogueCost { kLight, kHeavy };

template <EpilogueCost kEpilogueCost, Major kA, Major kB, class F>
void with_tile(const Product& p, F&& f) {
  constexpr int64_t kWide = kEpilogueCost == EpilogueCost::kLight ? 256 : 192,
                    kBlocks = kEpilogueCost == EpilogueCost::kLight ? 2 : 1;
  const int64_t of_wide = busiest(p, kWide, kBlocks), of_128 = busiest(p, 128, 1);
  if (busiest(p, 64, 1) < std::min(of_wide, of_128)) return f(Tile<64, kA, kB, 1, 7>{});
  if (of_wide <= of_128) return f(Tile<kWide, kA, kB, kBlocks, 4>{});
  f(Tile<128, kA, kB, 1, 5>{});
}

}  // namespace kf::KF_BACKEND::hopper
