// The epilogue of linear_bias_dropout_residual's v5: what becomes of a product's sums, for product_kernel of
// step2/hopper_product.h.
#pragma once

#include <step2/hopper_product.h>

namespace kf::KF_BACKEND::linear_bias_dropout_residual {

using hopper::EpilogueMaps;
using hopper::kConsumers;
using hopper::kSlice;
using hopper::kWarpRows;
using hopper::Schedule;

// Each consumer warp has two stages for rounds of 64 columns, which take turns. `arrived`: the residual of a round.
template <class Tile, class T>
struct InPlaceShared : hopper::Stages<Tile, T> {  // of one base only: see hopper::StagedShared
  alignas(1024) T stage[kConsumers * 4][2][kWarpRows * kSlice];
  alignas(uint32_t) T bias[2][Tile::kWidth];
  Pipeline<2> bias_pipe;
  uint64_t arrived[kConsumers * 4][2];
  Pipeline<Tile::kStages> pipe;
};

// A consumer warp's rounds, counted from the kernel's beginning over all its tiles. Under a tile's product one thing is
// done at each step: the load of a round's residual is issued, or added and the sum stored.
template <class Tile, class T>
struct InPlaceRounds {
  static constexpr int kRounds = Tile::kSlices;  // of a tile
  struct Corner {
    int row, column;  // of the warp's tile, the first ones
  };

  InPlaceShared<Tile, T>& shared;
  const EpilogueMaps& maps;
  hopper::Rounded<Tile, T> rounded;      // of the tile that waits
  Corner waits{}, next{};                // that tile, and the one that is being multiplied
  int issued = 0, added = 0, first = 0;  // rounds; the first of `next`

  __device__ InPlaceRounds(InPlaceShared<Tile, T>& shared, const EpilogueMaps& maps) : shared(shared), maps(maps) {}

  static __device__ __forceinline__ int warp() { return threadIdx.x / kWarpSize - 4; }
  static __device__ __forceinline__ bool leader() { return threadIdx.x % kWarpSize == 0; }

  __device__ __forceinline__ bool busy() const { return added < first; }

  // `end`: of the rounds whose loads may be issued.
  __device__ __forceinline__ void advance(int end) {
    if (issued < min(added + 2, end)) {
      issue_load();
    } else if (busy()) {
      add();
    }
  }

  // `next` is multiplied, and now waits: `rounded` takes its sums.
  __device__ __forceinline__ void begin() {
    waits = next;
    first += kRounds;
  }

 private:
  // Of the tile that waits, or already of the next one: so it is there when the sums are.
  __device__ __forceinline__ void issue_load() {
    if (leader()) {
      const bool of_next = issued >= first;
      // Not a reference to one of the two: it would need both, and all with them, to lie in memory.
      const int row = of_next ? next.row : waits.row, column = of_next ? next.column : waits.column;
      const int round = issued - (of_next ? first : first - kRounds);
      T* const stage = shared.stage[warp()][issued % 2];
      uint64_t* const arrived = &shared.arrived[warp()][issued % 2];
      tma_store_wait_read<0>();  // what was there has left
      mbarrier_arrive_expect_tx(arrived, sizeof shared.stage[0][0]);
      tma_load(stage, &maps.read, arrived, column + round * kSlice, row);
    }
    ++issued;
  }

  __device__ __forceinline__ void add() {
    T* const stage = shared.stage[warp()][added % 2];
    const int round = added - (first - kRounds);
    mbarrier_wait_warp(&shared.arrived[warp()][added % 2], added / 2 % 2);
    rounded.add(stage, round);
    tma_store_fence();
    __syncwarp();  // the round is written, and TMA may see it
    if (leader()) {
      tma_store(&maps.out, stage, waits.column + round * kSlice, waits.row);
      tma_store_commit();
    }
    ++added;
  }
};

template <class T>
struct AddInPlace {
  template <class Tile>
  using Shared = InPlaceShared<Tile, T>;

  const T* bias;  // or null
  int width;

  template <class Tile>
  __device__ void run(Shared<Tile>& shared, const Schedule& schedule, const EpilogueMaps& maps, int) const {
    hopper::Consumer<Tile, Shared<Tile>> consumer(shared);
    InPlaceRounds<Tile, T> rounds(shared, maps);
    const int row = consumer.number * 64 + static_cast<int>(threadIdx.x) / kWarpSize % 4 * kWarpRows;
    PipelineState<2> of_bias;
    int number = blockIdx.x;
    Schedule::Work work = schedule.find(number);
    while (number < schedule.count()) {
      rounds.next = {work.row * hopper::kRows + row, work.column * Tile::kWidth};
      consumer.step(false);
      number += gridDim.x;
      if (number < schedule.count()) work = schedule.find(number);  // divisions take their time: under a product
      for (int left = schedule.k_tiles - 1; left > 0 || rounds.busy(); --left) {
        if (left > 0) consumer.step(true);
        rounds.advance(rounds.first + rounds.kRounds);
      }
      consumer.wait();
      mbarrier_wait_warp(&shared.bias_pipe.full[of_bias.index], of_bias.phase);
      rounds.rounded.take(consumer.sum, shared.bias[of_bias.index]);
      shared.bias_pipe.consumer_release(of_bias.index);
      of_bias.advance();
      rounds.begin();
    }
    while (rounds.busy()) rounds.advance(rounds.first);
    if (rounds.leader()) tma_store_wait_read<0>();  // shared memory must last so long
  }
};

}  // namespace kf::KF_BACKEND::linear_bias_dropout_residual
