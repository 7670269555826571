// The end of linear_bias_dropout_residual's v5: what becomes of a product's sums, for product_kernel of
// step3/hopper_product.h.
#pragma once

#include <step3/hopper_product.h>

namespace kf::KF_BACKEND::linear_bias_dropout_residual {

using hopper::EndMaps;
using hopper::kConsumers;
using hopper::kSlice;
using hopper::kWarpRows;
using hopper::Schedule;

// Each consumer warp has two places for rounds of 64 columns, which take turns. `arrived`: the residual of a round.
template <class Tile, class T>
struct InPlaceShared : hopper::Places<Tile, T> {  // of one base only: see hopper::Shared
  alignas(1024) T place[kConsumers * 4][2][kWarpRows * kSlice];
  alignas(uint32_t) T bias[2][Tile::kWidth];
  alignas(uint64_t) uint64_t bias_full[2], bias_empty[2];
  uint64_t arrived[kConsumers * 4][2];
  uint64_t full[Tile::kPlaces], empty[Tile::kPlaces];
};

// A consumer warp's rounds, counted from the kernel's beginning over all its tiles. Under a tile's product one thing is
// done at each step: the residual of a round is asked for, or added and the sum stored.
template <class Tile, class T>
struct InPlaceRounds {
  static constexpr int kRounds = Tile::kSlices;  // of a tile
  struct Corner {
    int row, column;  // of the warp's tile, the first ones
  };

  InPlaceShared<Tile, T>& shared;
  const EndMaps& maps;
  hopper::Rounded<Tile, T> rounded;     // of the tile that waits
  Corner waits{}, next{};               // that tile, and the one that is being multiplied
  int asked = 0, added = 0, first = 0;  // rounds; the first of `next`

  __device__ InPlaceRounds(InPlaceShared<Tile, T>& shared, const EndMaps& maps) : shared(shared), maps(maps) {}

  static __device__ __forceinline__ int warp() { return threadIdx.x / kWarpSize - 4; }
  static __device__ __forceinline__ bool leader() { return threadIdx.x % kWarpSize == 0; }

  __device__ __forceinline__ bool busy() const { return added < first; }

  // `end`: of the rounds that may be asked for.
  __device__ __forceinline__ void advance(int end) {
    if (asked < min(added + 2, end)) {
      ask();
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
  __device__ __forceinline__ void ask() {
    if (leader()) {
      const bool of_next = asked >= first;
      // Not a reference to one of the two: it would need both, and all with them, to lie in memory.
      const int row = of_next ? next.row : waits.row, column = of_next ? next.column : waits.column;
      const int round = asked - (of_next ? first : first - kRounds);
      T* const place = shared.place[warp()][asked % 2];
      uint64_t* const arrived = &shared.arrived[warp()][asked % 2];
      tma_store_wait_read<0>();  // what was there has left
      mbarrier_arrive_expect(arrived, sizeof shared.place[0][0]);
      tma_load(place, &maps.read, arrived, column + round * kSlice, row);
    }
    ++asked;
  }

  __device__ __forceinline__ void add() {
    T* const place = shared.place[warp()][added % 2];
    const int round = added - (first - kRounds);
    mbarrier_wait_together(&shared.arrived[warp()][added % 2], added / 2 % 2);
    rounded.add(place, round);
    tma_store_fence();
    __syncwarp();  // the round is written, and TMA may see it
    if (leader()) {
      tma_store(&maps.out, place, waits.column + round * kSlice, waits.row);
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
  __device__ __forceinline__ void init(Shared<Tile>& shared) const {
    hopper::init_end(shared);
  }

  template <class Tile>
  __device__ __forceinline__ void prepare(Shared<Tile>& shared, const Schedule& schedule) const {
    hopper::bring_biases<Tile>(shared, schedule, bias, width);
  }

  template <class Tile>
  __device__ void run(Shared<Tile>& shared, const Schedule& schedule, const EndMaps& maps, int) const {
    hopper::Consumer<Tile, Shared<Tile>> consumer(shared);
    InPlaceRounds<Tile, T> rounds(shared, maps);
    const int row = consumer.number * 64 + static_cast<int>(threadIdx.x) / kWarpSize % 4 * kWarpRows;
    hopper::Ring<2> of_bias;
    int number = blockIdx.x;
    Schedule::Work work = schedule.find(number);
    while (number < schedule.count()) {
      rounds.next = {work.row * hopper::kRows + row, work.column * Tile::kWidth};
      consumer.step(false);
      number += gridDim.x;
      if (number < schedule.count()) work = schedule.find(number);  // divisions take their time: under a product
      for (int left = schedule.steps - 1; left > 0 || rounds.busy(); --left) {
        if (left > 0) consumer.step(true);
        rounds.advance(rounds.first + rounds.kRounds);
      }
      consumer.wait();
      mbarrier_wait_together(&shared.bias_full[of_bias.place], of_bias.phase);
      rounds.rounded.take(consumer.sum, shared.bias[of_bias.place]);
      mbarrier_arrive(&shared.bias_empty[of_bias.place]);
      of_bias.advance();
      rounds.begin();
    }
    while (rounds.busy()) rounds.advance(rounds.first);
    if (rounds.leader()) tma_store_wait_read<0>();  // shared memory must last so long
  }
};

}  // namespace kf::KF_BACKEND::linear_bias_dropout_residual
