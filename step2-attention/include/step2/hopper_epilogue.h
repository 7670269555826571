// What follows a product on Hopper, the epilogue, under the next tile's product.
//
//   consumers    │ product of tile 0 │ product of tile 1 │ …
//   the same                         │ epilogue of 0     │ epilogue of 1 …
#pragma once

#include <step2/hopper_sums.h>
#include <step2/hopper_tile.h>
#include <step2/pipeline.h>

#include <string>
#include <type_traits>

namespace kf::KF_BACKEND::hopper {

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

// And the bias of the tile under way and of the next one. Of one base only: at another's offset nvcc takes shared
// memory for any memory, whose loads and stores are slower.
template <class Tile, class T, class Epilogue>
struct StagedShared : Stages<Tile, T> {
  alignas(1024) Staging<Tile, T, Epilogue> staging[kConsumers * 4];
  alignas(uint32_t) T bias[2][Tile::kWidth];
  Pipeline<2> bias_pipe;
  uint64_t arrived[kConsumers * 4][2];  // what the warp's epilogue reads
  Pipeline<Tile::kStages> pipe;
};

// Calls f(work) for each work of this block's cluster.
template <class Tile, class F>
__device__ __forceinline__ void for_each_work(const Schedule& schedule, F f) {
  const int clusters = gridDim.x / Tile::kBlocks;
  for (int number = blockIdx.x / Tile::kBlocks; number < schedule.count(); number += clusters) f(schedule.find(number));
}

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
  shared.bias_pipe.init(kConsumers * kWarpgroupSize, kWarpSize);
  for (auto& of_warp : shared.arrived) mbarrier_init(&of_warp[0], 1), mbarrier_init(&of_warp[1], 1);
}

// Brings each tile's bias to shared memory. By a warp of the producer's warpgroup.
template <class Tile, class T, class Shared>
__device__ __forceinline__ void load_biases(Shared& shared, const Schedule& schedule, const T* bias, int width) {
  PipelineState<2> ring;
  for_each_work<Tile>(schedule, [&](const Schedule::Work& work) {
    shared.bias_pipe.producer_acquire(ring);
    load_bias<Tile>(shared.bias[ring.index], bias, work.column * Tile::kWidth, width);
    shared.bias_pipe.producer_commit(ring);
    ring.advance();
  });
}

// A consumer warp's sums of a tile that wait in registers, rounded, until they leave under the next tile's product, a
// part after each of its steps. The epilogue gets them eight neighbours at a time. TMA carries away what is to be
// written, and brings what is to be read: were it loaded into registers, each load would have to arrive before the next
// product may begin.
template <class Tile, class T, class Epilogue>
struct Deferred {
  using Shared = StagedShared<Tile, T, Epilogue>;
  using Staged = Staging<Tile, T, Epilogue>;
  static constexpr bool kPlain = std::is_same_v<Epilogue, Store<T>>;
  struct Corner {
    int row, column;  // of the warp's tile, the first ones
  };

  Shared& shared;
  const EpilogueMaps& maps;
  const Epilogue& epilogue;
  const bool by_tma;  // what leaves; if not, element by element: its rows do not begin at multiples of 16 bytes
  Rounded<Tile, T> rounded;
  Corner waits;                        // the tile that waits
  int part = Staged::kParts;           // of the tile that waits, the next one; that many: nothing waits
  int round = 0;                       // rounds done since the kernel began
  int first_round = -Staged::kRounds;  // the number of this tile's first
  int issued = 0;                      // rounds for which TMA brings what is read

  __device__ Deferred(Shared& shared, const EpilogueMaps& maps, const Epilogue& epilogue, bool by_tma)
      : shared(shared), maps(maps), epilogue(epilogue), by_tma(by_tma) {}

  static __device__ __forceinline__ int warp() { return threadIdx.x / kWarpSize - 4; }
  static __device__ __forceinline__ bool leader() { return threadIdx.x % kWarpSize == 0; }

  __device__ __forceinline__ bool busy() const { return part < Staged::kParts; }

  // The tile at `corner` is multiplied, and now waits: `rounded` has its sums.
  __device__ __forceinline__ void begin(const Corner& corner) {
    waits = corner, part = 0, first_round += Staged::kRounds;
  }

  // The next part of what waits; or, where nothing is to be done but to store, the next round. `next`: the tile that is
  // being multiplied, whose reads may be issued, if there is one: `tiles` is then 2, else 1.
  __device__ __forceinline__ void advance(const Corner& next, int tiles) {
    if constexpr (Epilogue::kReads) issue_load(next, tiles);
    if (!busy()) return;
    const int of_tile = part / Staged::kPartsARound;
    Staged& staging = shared.staging[warp()];
    if (part % Staged::kPartsARound == 0) {
      if (leader()) tma_store_wait_read<0>();
      __syncwarp();  // nobody reads the staging buffer any more
      rounded.template put<Staged::kSlicesARound>(staging.sums(), of_tile);
      __syncwarp();  // and now it is written
      if (Epilogue::kReads) mbarrier_wait_warp(&shared.arrived[warp()][round % 2], round / 2 % 2);
    }
    if (kPlain && by_tma) {
      part += Staged::kPartsARound;
    } else {
      apply_to_part(staging, part++);
    }
    if (part % Staged::kPartsARound == 0) {
      if (by_tma) tma_store_fence();
      __syncwarp();  // the round is written, and TMA may see it
      if (leader() && by_tma) store_round(staging, of_tile);
      ++round;
    }
  }

 private:
  // Issues the load of what the next round reads, as soon as there is a stage for it.
  __device__ __forceinline__ void issue_load(const Corner& next, int tiles) {
    static_assert(Staged::kSlicesARound == 1, "one box a round");
    const int of_tile = issued - first_round;
    if (issued == round + Staged::kOthers || of_tile == tiles * Staged::kRounds) return;
    if (leader()) {
      if (Epilogue::kWrites) tma_store_wait_read<0>();  // what was written there has left
      const bool of_next = of_tile >= Staged::kRounds;
      const int row = of_next ? next.row : waits.row, column = of_next ? next.column : waits.column;
      uint64_t* const arrived = &shared.arrived[warp()][issued % 2];
      mbarrier_arrive_expect_tx(arrived, Staged::kElements * sizeof(T));
      tma_load(shared.staging[warp()].other(issued), &maps.read, arrived, column + of_tile % Staged::kRounds * kSlice,
               row);
    }
    ++issued;
  }

  __device__ __forceinline__ void apply_to_part(Staged& staging, int of_part) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = waits.row + Staged::row_of(of_part, i), column = waits.column + Staged::column_of(of_part);
      T* const own = staging.sums() + Staged::offset_of(of_part, i);
      T* const other_own = staging.other(round) + Staged::offset_of(of_part, i);
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

  __device__ __forceinline__ void store_round(Staged& staging, int of_tile) const {
#pragma unroll
    for (int slice = 0; slice < Staged::kSlicesARound; ++slice) {
      const int offset = slice * kWarpRows * kSlice;
      const int column = waits.column + (of_tile * Staged::kSlicesARound + slice) * kSlice;
      tma_store(&maps.out, staging.sums() + offset, column, waits.row);
      if (Epilogue::kWrites) tma_store(&maps.written, staging.other(round) + offset, column, waits.row);
    }
    tma_store_commit();
  }
};

// ---- on the host ----

// Of what a warp's rounds write or read.
template <class T>
CUtensorMap map_of_rows(const Rows<T>& rows) {
  return map_of<T>(rows.data, Major::kMN, rows.width, rows.rows, kSlice, kWarpRows);
}

// Why TMA cannot bring the rows that an epilogue reads, or "".
inline std::string can_implement_read(const void* matrix, int64_t width) {
  if (width % 8 != 0) return "takes rows of a multiple of 8 elements, got " + std::to_string(width);
  return aligned_16(matrix) ? "" : "takes matrices that begin at multiples of 16 bytes";
}

}  // namespace kf::KF_BACKEND::hopper
