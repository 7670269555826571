// The projection of attention_block's v4: one warpgroup multiplies, tile by tile, while the others attend.
//
//   ring   stages with a and b, 64 of the depth each; after those of a tile one with the residual and the bias, in
//          which the sum is put together and from which it leaves
#pragma once

#include <step1/vector.h>
#include <step2/mbarrier.h>
#include <step2/mma.h>
#include <step2/pipeline.h>
#include <step2/reduce.h>
#include <step2/tma.h>
#include <step2/warpgroup.h>
#include <step2/wgmma.h>
#include <step3/dropout.h>

#include <step2/attention/hopper.h>

#include "order.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_block {

constexpr int kDepth = 64;  // of a stage
constexpr int kStages = 6;

template <class T>
struct Stage {
  T a[kGroupRows * kDepth];  // or the bias
  T b[kWidth * kDepth];      // or the residual, and then the sum: slices of 64 columns, swizzled
};

// Its column is −1: there are no more tiles.
struct Tile {
  Group group;
  int column;  // in tiles
};

template <class T>
struct ProjectShared {
  Stage<T> stage[kStages];
  Pipeline<kStages> pipe;
  uint64_t summed[2], stored[2];  // the sum is there; it has left its stage
  Tile tile[kStages];             // that begins there
  struct {
    Tile tile;
    int stage;
  } leaving[2];

  __device__ void init() {
    pipe.init(1);
    for (int i = 0; i < 2; ++i) mbarrier_init(&summed[i], kWarpgroupSize / kWarpSize), mbarrier_init(&stored[i], 1);
  }
};

struct ProjectMaps {
  CUtensorMap attended, weight, residual, sum;
};

template <class T>
ProjectMaps project_maps(const Args& a, const void* attended) {
  const Attention& t = a.attention;
  const auto batches = static_cast<uint64_t>(t.batch), length = static_cast<uint64_t>(t.q_length);
  const auto width = static_cast<uint64_t>(t.heads * t.head_dim), bytes = width * sizeof(T);
  const auto rows = [&](const void* first) {
    return make_tensor_map<T, 3>(static_cast<const T*>(first), {width, length, batches}, {bytes, bytes * length},
                                 {64, kGroupRows, 1}, Swizzle::k128);
  };
  return {
      rows(attended),
      make_tensor_map<T, 2>(static_cast<const T*>(a.proj_weight), {width, width}, {bytes}, {64, kDepth}, Swizzle::k128),
      rows(a.residual), rows(a.sum)};
}

// ---- what one thread loads ----

template <class T>
struct ProjectProducer {
  ProjectShared<T>& shared;
  const ProjectMaps& maps;
  const Order& order;
  const Counters& counters;
  const T* bias;
  const int width;
  PipelineState<kStages> ring;

  __device__ void issue_loads(const Tile& tile) {
    const int k_tiles = static_cast<int>(ceil_div(width, kDepth));
    const int column = tile.column * kWidth, row = tile.group.group * kGroupRows;
    const unsigned* const attended = counters.attended + order.number_of(tile.group);
    const auto heads = static_cast<unsigned>(order.heads);
    // The weights need not wait for attention. So as long as its rows are missing, stages get their weights first.
    bool there = load_acquire(attended) == heads;
    if (there) tma_global_fence();
    PipelineState<kStages> behind = ring;
    int issued = 0;
    const auto issue_row_loads = [&](int end) {
      for (; issued < end; ++issued, behind.advance()) {
        tma_load(shared.stage[behind.index].a, &maps.attended, &shared.pipe.full[behind.index], issued * kDepth, row,
                 tile.group.batch);
      }
    };
    const auto wait_for_rows = [&] {
      if (there) return;
      wait_for_counter(attended, heads);
      tma_global_fence();
      there = true;
    };
    for (int k = 0; k < k_tiles; ++k, ring.advance()) {
      if (k == kStages) wait_for_rows();  // no stage will be free before
      if (there) issue_row_loads(k);
      shared.pipe.producer_acquire(ring);
      if (k == 0) shared.tile[ring.index] = tile;
      mbarrier_arrive_expect_tx(&shared.pipe.full[ring.index], sizeof(Stage<T>));
#pragma unroll
      for (int c = 0; c < kWidth; c += 64) {
        tma_load(shared.stage[ring.index].b + c * kDepth, &maps.weight, &shared.pipe.full[ring.index], column + c,
                 k * kDepth);
      }
      if (there) issue_row_loads(k + 1);
    }
    wait_for_rows();
    issue_row_loads(k_tiles);
    Stage<T>& stage = shared.stage[ring.index];
    const uint32_t bias_bytes = min(kWidth, width - column) * static_cast<int>(sizeof(T));
    shared.pipe.producer_acquire(ring, sizeof stage.b + bias_bytes);
#pragma unroll
    for (int c = 0; c < kWidth; c += 64) {
      tma_load(stage.b + c * kGroupRows, &maps.residual, &shared.pipe.full[ring.index], column + c, row,
               tile.group.batch);
    }
    bulk_load(stage.a, bias + column, bias_bytes, &shared.pipe.full[ring.index]);
    ring.advance();
  }

  __device__ void run() {
    const auto count = static_cast<unsigned>(order.all_groups() * order.columns);
    unsigned drawn = atomicAdd(counters.drawn_projection, 1u);
    while (drawn < count) {
      const Tile tile{order.group(drawn / order.columns), static_cast<int>(drawn) % order.columns};
      drawn = atomicAdd(counters.drawn_projection, 1u);  // its answer takes time
      issue_loads(tile);
    }
    shared.pipe.producer_acquire(ring);
    shared.tile[ring.index].column = -1;
    shared.pipe.producer_commit(ring);
  }
};

// ---- what becomes of a sum ----

// By one thread of another warp: stores sums, and tells it when they are in memory. To the projecting warpgroup neither
// wait would be free.
template <class T>
__device__ void store_sums(ProjectShared<T>& shared, const ProjectMaps& maps, const Order& order,
                           const Counters& counters) {
  for (int number = 0;; ++number) {
    const int i = number % 2;
    mbarrier_wait(&shared.summed[i], number / 2 % 2);
    const Tile tile = shared.leaving[i].tile;
    const int stage = shared.leaving[i].stage;
    if (tile.column < 0) break;
#pragma unroll
    for (int c = 0; c < kWidth; c += 64) {
      tma_store(&maps.sum, shared.stage[stage].b + c * kGroupRows, tile.column * kWidth + c,
                tile.group.group * kGroupRows, tile.group.batch);
    }
    tma_store_commit();
    tma_store_wait_read<0>();
    shared.pipe.consumer_release(stage);
    mbarrier_arrive(&shared.stored[i]);
    tma_store_wait<0>();
    add_release(counters.projected + order.number_of(tile.group), 1u);
  }
}

// ---- by a warpgroup ----

// kDrops: whether dropout stands between the bias and the residual's addition. rows, width: of a batch's output.
template <bool kDrops, class T>
struct Project {
  ProjectShared<T>& shared;
  const int rows, width;
  const ElementwiseDropout<float>& dropout;
  const int number;  // of this warpgroup
  const int k_tiles = static_cast<int>(ceil_div(width, kDepth));
  const bool leader = leads_warpgroup(number);
  const int lane = threadIdx.x % kWarpSize, warp = static_cast<int>(threadIdx.x) / kWarpSize % 4;
  PipelineState<kStages> ring;
  int left = 0;  // sums that have left, or are about to

  __device__ Project(ProjectShared<T>& shared, int rows, int width, const ElementwiseDropout<float>& dropout,
                     int number)
      : shared(shared), rows(rows), width(width), dropout(dropout), number(number) {}

  __device__ void pass_on(const Tile& tile) {
    const int i = left % 2;
    if (threadIdx.x % kWarpgroupSize == 0) shared.leaving[i] = {tile, ring.index};
    if (lane == 0) mbarrier_arrive(&shared.summed[i]);
    ++left;
  }

  __device__ __forceinline__ void multiply(const Tile& tile) {
    float sum[kWidth / 2] = {};
    int in_use = -1;  // the stage that the product in flight reads
    const auto release = [&] {
      if (leader && in_use >= 0) shared.pipe.consumer_release(in_use);
      in_use = -1;
    };
    for (int k = 0; k < k_tiles; ++k) {
      shared.pipe.consumer_wait(ring);
      Stage<T>& stage = shared.stage[ring.index];
      const uint64_t of_a = matrix_descriptor(stage.a, 0, 1024, Swizzle::k128);
      const uint64_t of_b = matrix_descriptor(stage.b, 64 * kDepth * sizeof(T), 1024, Swizzle::k128);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kDepth / 16; ++i) {  // descriptors count in 16 bytes
        wgmma<kWidth, T, Major::kK, Major::kMN>(sum, of_a + i * (32 >> 4), of_b + i * (2048 >> 4), true);
      }
      wgmma_commit();
      wgmma_wait<1>();
      release();
      in_use = ring.index;
      ring.advance();
    }
    wgmma_wait<0>();
    release();

    shared.pipe.consumer_wait(ring);
    if (left >= 2) mbarrier_wait(&shared.stored[left % 2], (left / 2 - 1) % 2);  // the one before last has left
    Stage<T>& stage = shared.stage[ring.index];
    const int row = warp * 16 + lane % 16;
    const int64_t own_row = int64_t{tile.group.batch} * rows + tile.group.group * kGroupRows + warp * 16 + lane / 4;
    const int64_t element = own_row * width + tile.column * kWidth + lane % 4 * 2;  // of the lane's first product
#pragma unroll
    for (int group = 0; group < kWidth / 8; group += 2) {  // eight columns each
      const int own = group + lane / 16;
      T* const at = stage.b + own / 8 * kGroupRows * 64 + row * 64 + (own % 8 ^ row % 8) * 8;
      uint32_t pair[4];  // of a group rows g and g + 8, then the same of the next
      ldmatrix(pair, at);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float bias[2];
        widen(load_vector<2>(stage.a + (group + i) * 8 + lane % 4 * 2), bias);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float residual[2];
          widen(reinterpret_cast<const Vector<T, 2>&>(pair[2 * i + half]), residual);
          const float* const product = sum + 4 * (group + i) + 2 * half;
          float x[2] = {product[0] + bias[0], product[1] + bias[1]};
          if constexpr (kDrops) dropout.apply_aligned(element + half * 8 * width + (group + i) * 8, x);
          pair[2 * i + half] = pack<T>(x[0] + residual[0], x[1] + residual[1]);
        }
      }
      stmatrix(at, pair);
    }
    tma_store_fence();
    __syncwarp();
    pass_on(tile);
    ring.advance();
  }

  __device__ void run() {
    for (;;) {
      shared.pipe.consumer_wait(ring);
      const Tile& tile = shared.tile[ring.index];
      const int column = warp_uniform(tile.column);
      if (column < 0) break;
      multiply({{warp_uniform(tile.group.batch), warp_uniform(tile.group.group)}, column});
    }
    if (left >= 2) mbarrier_wait(&shared.stored[left % 2], (left / 2 - 1) % 2);
    pass_on({{0, 0}, -1});
  }
};

}  // namespace kf::KF_BACKEND::attention_block
