// What the rungs for Hopper share: the tiles that a block walks over, who loads them, and the way out.
#pragma once

#include <step2/attention/hopper.h>

#include "roles.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_backward {

using attention::kSlice;

constexpr int kAligned = 4;  // queries: bulk copies of their lse and Δ begin at multiples of 16 bytes

// kBuffers: for own rows. With two, the next ones are loaded while a block still works on these.
template <bool kOwnsKeys, int kColumns, int kOwnBuffers>
struct Shape {
  static constexpr int kBuffers = kOwnBuffers;
  static constexpr int kConsumers = kColumns == 64 && !kOwnsKeys ? 3 : 2;  // warpgroups
  static constexpr int kReaders = kConsumers;                              // of own rows
  static constexpr int kOwned = kConsumers * 64;                           // rows of a block
  static constexpr int kTile = kColumns == 128 && kOwnsKeys ? 32 : 64;     // rows walked over: 64 would spill
  static constexpr int kStages = kColumns == 128 && !kOwnsKeys && kBuffers == 2 ? 3 : 4;  // in the ring of tiles
  static constexpr int kSlices = kColumns / kSlice;
  static constexpr int kRegisters = kConsumers == 3 ? 160 : 232;  // of a consumer
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupSize;
};

template <class S, class T>
struct Shared {
  T a[S::kBuffers][S::kConsumers][S::kSlices][64 * kSlice];
  T b[S::kBuffers][S::kConsumers][S::kSlices][64 * kSlice];
  T x[S::kStages][S::kSlices][S::kTile * kSlice];
  T y[S::kStages][S::kSlices][S::kTile * kSlice];
  float lse[S::kStages][S::kTile], delta[S::kStages][S::kTile];  // of queries walked over
  Pipeline<S::kBuffers> own_pipe;
  Pipeline<S::kStages> pipe;
  uint64_t raw;
  // v5_persistent: whose rows lie in a and b. racecheck may report its second use, since one thread frees the buffer
  // for all of its warpgroup; they have met at a barrier before.
  int announced[S::kBuffers];

  __device__ void init_barriers() {
    mbarrier_init(&raw, 1);
    own_pipe.init(S::kReaders);
    pipe.init(S::kConsumers);
    mbarrier_init_fence();
  }
};

// Tiles of rows in the order in which persistent blocks take them: of each group of heads those with the most work
// first.
struct Queue {
  unsigned* next;  // number of the tile to be taken next
  unsigned tiles;  // of a head
  unsigned heads;
  unsigned together;  // heads of a group
  bool last_first;    // the last tile of a head has the most work

  __device__ int64_t tile(unsigned number) const {  // of all, as Role counts
    const unsigned group = number / (tiles * together), in_group = number % (tiles * together);
    const unsigned size = min(together, heads - group * together);
    const unsigned of_head = in_group / size;
    const unsigned head = group * together + in_group % size;
    return int64_t{head} * tiles + (last_first ? tiles - 1 - of_head : of_head);
  }
};

// Maps of the rows that roles.h names, and what delta_kernel has written, `length` rows a head.
struct Inputs {
  CUtensorMap a, b, x, y, da, db;
  const float* lse;
  const float* delta;
  int64_t length;
};

// The tiles that a block walks over, those first that its own rows meet the mask in: keys from the last to the first,
// queries from the first to the last. All in 32 bits, and alike in all lanes. The first tile of queries begins up to
// three rows early, since bulk copies of lse and Δ must begin at multiples of 16 bytes; from v6 on at a multiple of
// 64, so that all blocks mean the same rows by a tile of dq.
template <bool kOwnsKeys, int kTile, int kFrom = kAligned>
struct Walk {
  int base, count;
  int early;  // rows of the first tile that the block is not paired with

  template <class T>
  __device__ explicit Walk(const Role<kOwnsKeys, T>& role) {
    const int begin = static_cast<int>(role.walked.begin);
    base = warp_uniform(kOwnsKeys ? begin / kFrom * kFrom : begin);
    early = warp_uniform(begin - base);
    const int rows = static_cast<int>(max(role.walked.end - base, int64_t{0}));
    count = warp_uniform((rows + kTile - 1) / kTile);
  }

  __device__ int row(int tile) const { return base + (kOwnsKeys ? tile : count - 1 - tile) * kTile; }

  // From which tile on the row sees any of it, and from which on all of it; `pairs`: what the row is paired with.
  __device__ int first_seen(const Range& pairs) const {
    const int at = static_cast<int>(kOwnsKeys ? pairs.begin : pairs.end - 1) - base;
    const int first = kOwnsKeys ? at / kTile : count - 1 - at / kTile;
    return warp_uniform(pairs.begin < pairs.end ? first : count);
  }
  __device__ int first_whole(const Range& pairs) const {
    const int at = static_cast<int>(kOwnsKeys ? pairs.begin : pairs.end) - base;
    const int first = kOwnsKeys ? (at + kTile - 1) / kTile : count - at / kTile;
    return warp_uniform(pairs.begin < pairs.end ? first : count);
  }
};

// What the producer, one warp, loads, and where it stands.
template <class S, bool kOwnsKeys, class T>
struct Producer {
  const Args& a;
  Shared<S, T>& shared;
  const Inputs& in;
  PipelineState<S::kStages> ring = {};
  int raw_phase = 0;

  // The rows that the block owns. One thread does this.
  __device__ void load_own(const Role<kOwnsKeys, T>& role, int buffer) {
    uint64_t* const full = &shared.own_pipe.full[buffer];
    mbarrier_arrive_expect_tx(full, sizeof shared.a[0] + sizeof shared.b[0]);
    for (int w = 0; w < S::kConsumers; ++w) {
      const int row = static_cast<int>(role.first) + w * 64, head = role.head_of_batch(), batch = role.batch();
      attention::load_slices<S::kSlices, 64>(shared.a[buffer][w], &in.a, full, row, head, batch);
      attention::load_slices<S::kSlices, 64>(shared.b[buffer][w], &in.b, full, row, head, batch);
    }
  }

  // The tiles that it walks over, in this order. The whole warp does this.
  __device__ void load_walked(const Role<kOwnsKeys, T>& role, const Walk<kOwnsKeys, S::kTile>& walk) {
    const bool leader = threadIdx.x % kWarpSize == 0;
    const int batch = role.batch();
    for (int64_t head = role.first_head(); head < role.end_head(); ++head) {
      const int other_head = static_cast<int>(kOwnsKeys ? head % a.heads : head / role.group % a.kv_heads);
      for (int tile = 0; tile < walk.count; ++tile, ring.advance()) {
        const int stage = ring.index, row = walk.row(tile);
        // Padding may be NaN, which a weight or a gradient of 0 would not make 0. It lies in the first tile.
        const int first = kOwnsKeys && tile == 0 ? walk.early : 0;
        const int end = kOwnsKeys ? S::kTile : min(S::kTile, static_cast<int>(role.keys.end) - row);
        const bool has_padding = first > 0 || end < S::kTile;
        uint64_t* const full = has_padding ? &shared.raw : &shared.pipe.full[stage];
        if (leader) {
          shared.pipe.producer_acquire(ring);
          const int more = kOwnsKeys ? sizeof shared.lse[0] + sizeof shared.delta[0] : 0;
          mbarrier_arrive_expect_tx(full, sizeof shared.x[0] + sizeof shared.y[0] + more);
          attention::load_slices<S::kSlices, S::kTile>(shared.x[stage], &in.x, full, row, other_head, batch);
          attention::load_slices<S::kSlices, S::kTile>(shared.y[stage], &in.y, full, row, other_head, batch);
          if constexpr (kOwnsKeys) {
            const int64_t query = head * in.length + row;
            bulk_load(shared.lse[stage], in.lse + query, sizeof shared.lse[0], full);
            bulk_load(shared.delta[stage], in.delta + query, sizeof shared.delta[0], full);
          }
        }
        if (!has_padding) continue;
        mbarrier_wait(&shared.raw, raw_phase);
        raw_phase ^= 1;
        const auto clear = [&](auto* tile_of_rows, int from, int to) {
          attention::clear_rows<S::kSlices, S::kTile>(tile_of_rows, from, threadIdx.x % kWarpSize, kWarpSize, to);
        };
        clear(shared.x[stage], end, S::kTile);
        clear(shared.x[stage], 0, first);
        clear(shared.y[stage], 0, first);
        tma_store_fence();
        __syncwarp();
        if (leader) shared.pipe.producer_commit(ring);
      }
    }
  }
};

// This lane's part of 64 rows, as operand a: columns 16·k of its warp's rows.
template <class T>
__device__ __forceinline__ void load_operand(uint32_t (&operand)[4][4], const T* tile) {
  const int lane = threadIdx.x % kWarpSize, row = static_cast<int>(threadIdx.x / kWarpSize % 4) * 16 + lane / 4;
  const auto* const bytes = reinterpret_cast<const unsigned char*>(tile);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = (row + i % 2 * 8) * 128 + k * 32 + i / 2 * 16 + lane % 4 * 4;
      operand[k][i] = *reinterpret_cast<const uint32_t*>(bytes + swizzled_offset(at, Swizzle::k128));
    }
  }
}

// Multiplies a tile's gradients of weights by what dropout multiplied the weights by. Returns the bits of those that
// were kept, as Dropout::kept, for the weights that v met.
template <bool kOwnsKeys, int N>
__device__ __forceinline__ uint64_t drop_gradients(attention::AttentionDropout& dropout, float (&grad)[N], int64_t head,
                                                   int64_t row, int64_t column) {
  const uint64_t kept = dropout.kept<kOwnsKeys, N>(head, row, column);
  const float scale = dropout.scale();
#pragma unroll
  for (int i = 0; i < N; ++i) grad[i] = kept >> i & 1 ? grad[i] * scale : 0.0f;
  return kept;
}

// 64 rows of a gradient into `tile`, slices of 64 rows, from where TMA may store it after a barrier of the warpgroup.
// Rows that do not exist become 0.
template <class T, int N>
__device__ __forceinline__ void put_gradient(const float (&sum)[N], float factor, const bool (&exists)[2],
                                             T (*tile)[64 * kSlice]) {
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
}

// 64 rows of a gradient, by `tile`, to where they belong; where `stays`, only into it.
template <class T, int N>
__device__ void store_gradient(const float (&sum)[N], float factor, const bool (&exists)[2], T (*tile)[64 * kSlice],
                               const CUtensorMap* map, int row, int head, int batch, int barrier, bool leader,
                               bool stays = false) {
  put_gradient(sum, factor, exists, tile);
  named_barrier_sync(barrier, kWarpgroupSize);
  if (leader && !stays) {
    for (int slice = 0; slice < N / 32; ++slice) tma_store(map, tile[slice], slice * kSlice, row, head, batch);
    tma_store_commit();
  }
}

// Rows a head that Δ and lse have: the last tile may begin at the last query. Of a packed row those of all slots.
inline int64_t padded_length(const Args& a) {
  if (a.cu_seqlens != nullptr) return slots_of(a, a.q_length, DocumentTiles::kQueries) * DocumentTiles::kQueries;
  return ceil_div(a.q_length, kAligned) * kAligned + 64;
}

// From v4 on: Δ and lse, `padded_length` rows a head, and, from v5 on, two counters.
struct Scratch {
  float *delta, *lse;
  unsigned* counter;

  Scratch(const Args& a, void* first) : delta(static_cast<float*>(first)) {
    const int64_t rows = a.batch * a.heads * padded_length(a);
    lse = delta + rows;
    counter = reinterpret_cast<unsigned*>(lse + rows);
  }
};

template <bool kOwnsKeys, int kTile, class T>
Inputs inputs_of(const Args& a, const float* lse, const float* delta) {
  constexpr int kQueries = kOwnsKeys ? kTile : 64, kKeys = kOwnsKeys ? 64 : kTile;  // rows of a copy
  const auto of_queries = [&](const void* tensor, const Strides& stride) {
    return attention::map_of<T>(a, tensor, stride, a.heads, a.q_length, kQueries);
  };
  const auto of_keys = [&](const void* tensor, const Strides& stride) {
    return attention::map_of<T>(a, tensor, stride, a.kv_heads, a.k_length, kKeys);
  };
  const CUtensorMap q = of_queries(a.q, a.q_stride), grad = of_queries(a.grad, a.grad_stride);
  const CUtensorMap k = of_keys(a.k, a.k_stride), v = of_keys(a.v, a.v_stride);
  if constexpr (kOwnsKeys) {
    const CUtensorMap dk = of_keys(a.dk, a.dk_stride), dv = of_keys(a.dv, a.dv_stride);
    return {k, v, q, grad, dk, dv, lse, delta, padded_length(a)};
  } else {
    const CUtensorMap dq = of_queries(a.dq, a.dq_stride);
    return {q, grad, k, v, dq, dq, lse, delta, padded_length(a)};
  }
}

}  // namespace kf::KF_BACKEND::attention_backward
