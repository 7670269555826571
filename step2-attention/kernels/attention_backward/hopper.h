// What the rungs for Hopper share: the tiles that a block walks over, who fetches them, and the way out.
#pragma once

#include "../attention/hopper.h"
#include "roles.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_backward {

using attention::kSlice;

constexpr int kPlaces = 4;   // in the ring of tiles
constexpr int kAligned = 4;  // floats: bulk copies begin and end at multiples of 16 bytes

template <bool kOwnsKeys, int kColumns>
struct Shape {
  static constexpr int kConsumers = kColumns == 64 && !kOwnsKeys ? 3 : 2;  // warpgroups
  static constexpr int kOwned = kConsumers * 64;                           // rows of a block
  static constexpr int kTile = kColumns == 128 && kOwnsKeys ? 32 : 64;     // rows walked over: 64 would spill
  static constexpr int kSlices = kColumns / kSlice;
  static constexpr int kRegisters = kConsumers == 3 ? 160 : 240;  // of a consumer
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupSize;
};

template <class S, class T>
struct Shared {
  T a[S::kConsumers][S::kSlices][64 * kSlice];
  T b[S::kConsumers][S::kSlices][64 * kSlice];
  T x[kPlaces][S::kSlices][S::kTile * kSlice];
  T y[kPlaces][S::kSlices][S::kTile * kSlice];
  float lse[kPlaces][S::kTile + kAligned], delta[kPlaces][S::kTile + kAligned];  // of queries walked over
  // Full: the tile has arrived, one arrival and its bytes. Empty: all consumers have left it.
  uint64_t own_full, full[kPlaces], empty[kPlaces], raw;
};

// Maps of the rows that roles.h names, and what delta_kernel has written, `length` rows a head.
struct Inputs {
  CUtensorMap a, b, x, y, da, db;
  const float* lse;
  const float* delta;
  int64_t length;
};

// The tiles that a block walks over, those first that its own rows meet the mask in: keys from the last to the first,
// queries from the first to the last. All in 32 bits, and alike in all lanes.
template <bool kOwnsKeys, int kTile>
struct Walk {
  int base, count;

  template <class T>
  __device__ explicit Walk(const Role<kOwnsKeys, T>& role) {
    base = same_in_warp(static_cast<int>(role.walked.begin));
    const int rows = max(static_cast<int>(role.walked.end) - base, 0);
    count = same_in_warp((rows + kTile - 1) / kTile);
  }

  __device__ int row(int tile) const { return base + (kOwnsKeys ? tile : count - 1 - tile) * kTile; }

  // From which tile on the row sees any of it, and from which on all of it; `pairs`: what the row is paired with.
  __device__ int first_seen(const Range& pairs) const {
    const int at = static_cast<int>(kOwnsKeys ? pairs.begin : pairs.end - 1) - base;
    const int first = kOwnsKeys ? at / kTile : count - 1 - at / kTile;
    return same_in_warp(pairs.begin < pairs.end ? first : count);
  }
  __device__ int first_whole(const Range& pairs) const {
    const int at = static_cast<int>(kOwnsKeys ? pairs.begin : pairs.end) - base;
    const int first = kOwnsKeys ? (at + kTile - 1) / kTile : count - at / kTile;
    return same_in_warp(pairs.begin < pairs.end ? first : count);
  }
};

// One warp of the producer.
template <class S, bool kOwnsKeys, class T, class Walk>
__device__ void produce(const Args& a, const Role<kOwnsKeys, T>& role, const Walk& walk, Shared<S, T>& shared,
                        const Inputs& in) {
  using attention::load_slices;
  const bool leader = threadIdx.x % kWarpSize == 0;
  const int batch = role.batch(), own_head = role.head_of_batch();
  if (leader) {
    mbarrier_arrive_expect(&shared.own_full, sizeof shared.a + sizeof shared.b);
    for (int w = 0; w < S::kConsumers; ++w) {
      const int row = static_cast<int>(role.first) + w * 64;
      load_slices<S::kSlices, 64>(shared.a[w], &in.a, &shared.own_full, row, own_head, batch);
      load_slices<S::kSlices, 64>(shared.b[w], &in.b, &shared.own_full, row, own_head, batch);
    }
  }
  attention::Ring<kPlaces> ring;
  for (int64_t head = role.first_head(); head < role.end_head(); ++head) {
    const int other_head = static_cast<int>(kOwnsKeys ? head % a.heads : head / role.group % a.kv_heads);
    for (int tile = 0; tile < walk.count; ++tile, ring.advance()) {
      const int place = ring.place, row = walk.row(tile);
      const int keys = kOwnsKeys ? S::kTile : static_cast<int>(role.keys.end) - row;  // in the tile, or more
      uint64_t* const full = keys < S::kTile ? &shared.raw : &shared.full[place];
      if (leader) {
        mbarrier_wait(&shared.empty[place], ring.phase ^ 1);
        const int more = kOwnsKeys ? sizeof shared.lse[0] + sizeof shared.delta[0] : 0;
        mbarrier_arrive_expect(full, sizeof shared.x[0] + sizeof shared.y[0] + more);
        load_slices<S::kSlices, S::kTile>(shared.x[place], &in.x, full, row, other_head, batch);
        load_slices<S::kSlices, S::kTile>(shared.y[place], &in.y, full, row, other_head, batch);
        if constexpr (kOwnsKeys) {
          const int64_t first = head * in.length + row / kAligned * kAligned;
          bulk_load(shared.lse[place], in.lse + first, sizeof shared.lse[0], full);
          bulk_load(shared.delta[place], in.delta + first, sizeof shared.delta[0], full);
        }
      }
      if (keys < S::kTile) {  // the first tile only: padding in k may be NaN, which a gradient of 0 would not make 0
        mbarrier_wait(&shared.raw, 0);
        attention::clear_rows<S::kSlices, S::kTile>(shared.x[place], keys, threadIdx.x % kWarpSize, kWarpSize);
        tma_store_fence();
        __syncwarp();
        if (leader) mbarrier_arrive(&shared.full[place]);
      }
    }
  }
}

// 64 rows of a gradient, by `tile`, slices of 64 rows, to where they belong. Rows that do not exist become 0.
template <class T, int N>
__device__ void store_gradient(const float (&sum)[N], float factor, const bool (&exists)[2], T (*tile)[64 * kSlice],
                               const CUtensorMap* map, int row, int head, int batch, int barrier, bool leader) {
  const int lane = threadIdx.x % kWarpSize;
  const int row_of_group = static_cast<int>(threadIdx.x / kWarpSize % 4) * 16 + lane / 4;
  const uint32_t row_offset = swizzled_offset(row_of_group * kSlice * sizeof(T), Swizzle::k128) + lane % 4 * 4;
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const int slice = i / 32, chunk = i / 4 % 8, below = i / 2 % 2;  // 8 rows below the swizzle is the same
    auto* const to = reinterpret_cast<unsigned char*>(tile[slice]) + (row_offset ^ chunk * 16) + below * 8 * 128;
    *reinterpret_cast<uint32_t*>(to) = exists[below] ? pack<T>(sum[i] * factor, sum[i + 1] * factor) : 0;
  }
  tma_store_fence();
  named_barrier_sync(barrier, kWarpgroupSize);
  if (leader) {
    for (int slice = 0; slice < N / 32; ++slice) tma_store(map, tile[slice], slice * kSlice, row, head, batch);
    tma_store_commit();
  }
}

// Rows a head that Δ and lse have: the last tile may begin at the last query.
inline int64_t padded_length(const Args& a) { return ceil_div(a.q_length, kAligned) * kAligned + 64 + kAligned; }

}  // namespace kf::KF_BACKEND::attention_backward
