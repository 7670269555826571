// Both layers of many rows by persistent blocks: in which order the tiles of the two are computed, what a block keeps
// in shared memory, and what becomes of a consumer's sums. Products are as in hopper_product.h.
//
// Why nothing waits for ever, with however many blocks at once: numbers are drawn by blocks that run, and a tile of the
// second layer has a greater one than all that it reads. Take, of the tiles that are not done, the one with the least
// number. What it reads is there, and its block has done all before it, so its product comes to an end. Its
// epilogue runs under the block's next tile, which the producer announces before it waits for rows. If that one is of
// the second layer, a warp first finishes what it has, unless the first stage is there; and then the others come
// without waiting.
#pragma once

#include <step2/acquire.h>
#include <step2/hopper_product.h>
#include <step3/epilogues.h>

#include <algorithm>

#include "rungs.h"

namespace kf::KF_BACKEND::mlp {

// ---- which tile comes when ----

// A tile of a layer: 128 rows, and as many columns as Tile has.
struct Work {
  static constexpr int kNone = -1;
  int layer;  // 0, 1, or, when nothing is left, kNone
  int row, column;
};

// Rows are taken in bands: the first layer of bands 0 and 1, then the second of band 0, the first of 2, the second of
// 1, and so on; at its end the second of the last two. When a tile of the second layer comes all tiles that it reads
// have come before, and most often they are long done.
struct Order {
  int down, band;            // tiles below each other; of them in a band
  int right[2], k_tiles[2];  // of each layer: tiles side by side; stages along the depth

  __host__ __device__ int count() const { return down * (right[0] + right[1]); }

  __device__ int rows_of(int b) const { return max(min(band, down - b * band), 0); }

  // Tile `number` of a band.
  __device__ Work in_band(int layer, int b, int number) const {
    const hopper::Schedule::Work tile = hopper::Schedule{rows_of(b), right[layer], 1}.find(number);
    return {layer, b * band + tile.row, tile.column};
  }

  __device__ Work find(unsigned drawn) const {
    if (drawn >= static_cast<unsigned>(count())) return {Work::kNone, 0, 0};
    int number = static_cast<int>(drawn);
    const int first = rows_of(0) * right[0];
    if (number < first) return in_band(0, 0, number);
    number -= first;
    // The first layer of band b + 1, then the second of b. With the last but one comes what is left of the last.
    const int together = band * (right[0] + right[1]), bands = (down + band - 1) / band;
    const int b = min(number / together, max(bands - 2, 0));
    number -= b * together;
    const int next = rows_of(b + 1) * right[0], own = rows_of(b) * right[1];
    if (number < next) return in_band(0, b + 1, number);
    number -= next;
    return number < own ? in_band(1, b, number) : in_band(1, b + 1, number - own);
  }
};

// In scratch memory, 0 when the kernel begins: the next number to be drawn, and of each tile's rows how many parts of
// the activation are there, a part being what one consumer warp has of a tile.
struct Counters {
  static constexpr int kPartsATile = hopper::kConsumers * 4;
  unsigned* drawn;
  unsigned* stored;

  explicit Counters(void* memory) : drawn(static_cast<unsigned*>(memory)), stored(drawn + 1) {}
  static int64_t bytes(int64_t down) { return (1 + down) * int64_t{sizeof(unsigned)}; }
};

// ---- what a block keeps ----

// Each consumer warp has two stages for its sums' rounds of 64 columns. `announced`: the work under way, and the next
// one; its bias comes when it is known, and it is done when all consumers have added that. `work` also has the one
// whose sums wait.
template <class Tile, class T>
struct BothShared : hopper::Stages<Tile, T> {  // of one base only: see hopper::StagedShared
  static_assert(Tile::kSlices % 2 == 0, "rounds take turns in two stages, and each tile begins with the first");
  alignas(1024) T stage[hopper::kConsumers * 4][2][hopper::kWarpRows * hopper::kSlice];
  alignas(uint32_t) T bias[2][Tile::kWidth];
  Work work[4];
  alignas(uint64_t) uint64_t announced[2], bias_full[2], done[2];
  uint64_t arrived[hopper::kConsumers * 4][2];  // the residual
  Pipeline<Tile::kStages> pipe;

  __device__ void init() {
    pipe.init(hopper::kConsumers);
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(&announced[i], 1);
      mbarrier_init(&bias_full[i], kWarpSize);
      mbarrier_init(&done[i], hopper::kConsumers * kWarpgroupSize);
    }
    for (auto& of_warp : arrived) mbarrier_init(&of_warp[0], 1), mbarrier_init(&of_warp[1], 1);
  }
};

// Of both layers: what is multiplied, and what leaves.
struct BothMaps {
  CUtensorMap a[2], b[2], out[2], preactivation, residual;
};

template <class T>
struct Layers {
  const T* bias[2];
  int width[2];
  bool residual;
  Order order;
  Counters counters;
};

// ---- what comes in ----

// By one thread.
template <class Tile, class T>
__device__ void produce(BothShared<Tile, T>& shared, const BothMaps& maps, const Layers<T>& layers) {
  const auto draw = [&] { return atomicAdd(layers.counters.drawn, 1u); };
  const unsigned all_parts = static_cast<unsigned>(layers.order.right[0]) * Counters::kPartsATile;
  PipelineState<Tile::kStages> ring;
  unsigned number = draw();
  for (int tile = 0;; ++tile) {
    const Work work = layers.order.find(number);
    mbarrier_wait(&shared.done[tile % 2], tile / 2 % 2 ^ 1);
    shared.work[tile % 4] = work;
    mbarrier_arrive(&shared.announced[tile % 2]);
    if (work.layer == Work::kNone) break;
    if (work.layer == 1) {
      wait_for_counter(layers.counters.stored + work.row, all_parts);
      tma_global_fence();  // TMA wrote them, and TMA reads them
    }
    const int k_tiles = layers.order.k_tiles[work.layer];
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile, ring.advance()) {
      if (k_tile == k_tiles - 1) number = draw();  // there when the stages are full
      shared.pipe.producer_acquire(ring, Tile::kStageBytes);
      hopper::issue_loads<Tile>(shared, ring.index, &maps.a[work.layer], &maps.b[work.layer], work.row * hopper::kRows,
                                work.column * Tile::kWidth, k_tile * hopper::kDepth, 0);
    }
  }
}

// By a warp beside the producer.
template <class Tile, class T>
__device__ void load_biases(BothShared<Tile, T>& shared, const Layers<T>& layers) {
  for (int tile = 0;; ++tile) {
    mbarrier_wait(&shared.announced[tile % 2], tile / 2 % 2);
    const Work work = shared.work[tile % 4];
    if (work.layer == Work::kNone) break;
    hopper::load_bias<Tile>(shared.bias[tile % 2], layers.bias[work.layer], work.column * Tile::kWidth,
                            layers.width[work.layer]);
    mbarrier_arrive(&shared.bias_full[tile % 2]);
  }
}

// ---- what becomes of a consumer warp's sums ----

// They are rounded and wait in registers, as in hopper_epilogue.h, and leave in parts under the next tile's product,
// two parts for each round of 64 columns. Of the first layer a part is GELU of half of them. Of the second the residual
// is added in the first part, where stmatrix would put the sums: it has come to that very stage, so that two stages are
// enough and tiles may be 256 columns wide. In the second part the load of the residual of the round after the next is
// issued.
template <class Tile, class T, class Gelu>
struct LayerEpilogues {
  static constexpr int kRounds = Tile::kSlices, kParts = 2 * kRounds;
  using Lane = hopper::Parts<1>;

  BothShared<Tile, T>& shared;
  const BothMaps& maps;
  const Gelu& gelu;
  unsigned* const stored;
  const bool residual;
  hopper::Rounded<Tile, T> rounded;
  int tile = 0;    // the one under way, counted from the kernel's beginning; the one before waits
  int left = 0;    // parts of that
  int second = 0;  // tiles of the second layer that were here

  __device__ LayerEpilogues(BothShared<Tile, T>& shared, const BothMaps& maps, const Gelu& gelu,
                            const Layers<T>& layers)
      : shared(shared), maps(maps), gelu(gelu), stored(layers.counters.stored), residual(layers.residual) {}

  static __device__ __forceinline__ int warp() { return threadIdx.x / kWarpSize - 4; }
  static __device__ __forceinline__ int row_of(const Work& work) {
    return work.row * hopper::kRows + warp() * hopper::kWarpRows;
  }
  static __device__ __forceinline__ int column_of(const Work& work, int round) {
    return work.column * Tile::kWidth + round * hopper::kSlice;
  }
  static __device__ __forceinline__ bool leader() { return threadIdx.x % kWarpSize == 0; }

  __device__ __forceinline__ bool busy() const { return left > 0; }

  // The tile under way is multiplied, and now waits: the load of its residual is issued, and then `rounded` may take
  // its sums. The first layer has two more parts: a pause, in which the last round is stored, and the news that it is.
  __device__ __forceinline__ void begin() {
    const Work& work = shared.work[tile++ % 4];
    left = work.layer == 0 ? kParts + 2 : kParts;
    second += work.layer;
    if (work.layer == 1) issue_load(work, 0), issue_load(work, 1);
  }

  // The next part, if there is one.
  __device__ __forceinline__ void advance() {
    if (!busy()) return;
    const Work& work = shared.work[(tile + 3) % 4];  // where it costs no registers
    const int now = (work.layer == 0 ? kParts + 2 : kParts) - left--, round = now / 2;
    const bool begins = now % 2 == 0;
    if (work.layer == 1) {
      begins ? add_residual(work, round) : issue_load(work, round + 2);
    } else if (now < kParts) {
      gelu_of_half(work, now, round, begins);
    } else if (!begins) {
      tell(work);
    }
  }

  __device__ __forceinline__ void finish() {
    while (busy()) advance();
  }

 private:
  // Issues the load of a round's residual, if the tile has that many. What was in its place must be stored by then.
  __device__ __forceinline__ void issue_load(const Work& work, int round) {
    if (!residual || round >= kRounds || !leader()) return;
    tma_store_wait_read<0>();
    uint64_t* const arrived = &shared.arrived[warp()][round % 2];
    mbarrier_arrive_expect_tx(arrived, sizeof shared.stage[0][0]);
    tma_load(shared.stage[warp()][round % 2], &maps.residual, arrived, column_of(work, round), row_of(work));
  }

  __device__ __forceinline__ void gelu_of_half(const Work& work, int now, int round, bool begins) {
    T* const stage = shared.stage[warp()][Gelu::kWrites ? 0 : round % 2];
    T* const other = shared.stage[warp()][1];
    if (begins) {
      if (leader()) tma_store_wait_read<Gelu::kWrites ? 0 : 1>();
      __syncwarp();  // what was there has left
      rounded.template put<1>(stage, round);
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = Lane::offset_of(now, i);
      Packed<T> value = load_packed(stage + at), product;
      gelu(0, 0, value, product);  // it asks for no row or column
      store_packed(stage + at, value);
      if constexpr (Gelu::kWrites) store_packed(other + at, product);
    }
    if (!begins) store(work, &maps.out[0], stage, &maps.preactivation, Gelu::kWrites ? other : nullptr, round);
  }

  __device__ __forceinline__ void add_residual(const Work& work, int round) {
    T* const stage = shared.stage[warp()][round % 2];
    if (residual) {
      // A tile takes each stage kRounds / 2 times. If that is even the phases are those of any other tile.
      const int before = kRounds / 2 % 2 == 0 ? 0 : second - 1;
      mbarrier_wait_warp(&shared.arrived[warp()][round % 2], (before + round / 2) % 2);
    } else {
      if (leader()) tma_store_wait_read<1>();
      __syncwarp();
    }
    residual ? rounded.add(stage, round) : rounded.template put<1>(stage, round);
    store(work, &maps.out[1], stage, nullptr, nullptr, round);
  }

  __device__ __forceinline__ void store(const Work& work, const CUtensorMap* map, const T* from,
                                        const CUtensorMap* other_map, const T* other, int round) {
    tma_store_fence();
    __syncwarp();  // the round is written, and TMA may see it
    if (!leader()) return;
    tma_store(map, from, column_of(work, round), row_of(work));
    if (other != nullptr) tma_store(other_map, other, column_of(work, round), row_of(work));
    tma_store_commit();
  }

  // That this warp's part of the activation is in memory.
  __device__ __forceinline__ void tell(const Work& work) {
    if (!leader()) return;
    tma_store_wait<0>();
    add_release(stored + work.row, 1);
  }
};

// ---- on the host ----

inline Product product_of_layer(const Args& a, int layer) {
  return layer == 0 ? Product{a.x, a.weight_1, a.bias_1, a.rows, a.width, a.inner}
                    : Product{a.scratch, a.weight_2, a.bias_2, a.rows, a.inner, a.width};
}

inline Major major_of(const Args& a) { return a.weight_transposed ? Major::kK : Major::kMN; }

template <class Tile, class T>
Order order_of(const Args& a) {
  const hopper::Schedule first = hopper::schedule_of<Tile>(product_of_layer(a, 0)),
                         second = hopper::schedule_of<Tile>(product_of_layer(a, 1));
  const int band = static_cast<int>(std::max<int64_t>(multiprocessors() / second.right, 1));
  return {first.down, std::min(band, first.down), {first.right, second.right}, {first.k_tiles, second.k_tiles}};
}

// What the busiest block would have to do if the layers were two launches.
inline int64_t busiest(const Args& a, int64_t width) {
  return hopper::busiest(product_of_layer(a, 0), width, 1) * a.width +
         hopper::busiest(product_of_layer(a, 1), width, 1) * a.inner;
}

}  // namespace kf::KF_BACKEND::mlp
