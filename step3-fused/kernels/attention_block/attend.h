// The attention of attention_block's v4: step 2's v8_persistent with three warpgroups instead of four, a stage for a
// warpgroup's queries that is filled again as soon as it has read them, and an output that goes straight to memory. Of
// dropout there is nothing.
#pragma once

#include <kf/numeric.h>

#include <step2/attention/hopper.h>

#include "order.h"

namespace kf::KF_BACKEND::attention_block {

constexpr int kAttenders = kBandGroups;  // warpgroups
constexpr int kHeadColumns = 64;         // head_dim, or more: then zeros
constexpr int kKeys = 64;                // of a tile
constexpr int kKeyStages = 3;            // for tiles of K, and as many for V

// A band of one head, as the producer announces it. Its head is −1: there are no more.
struct Announced {
  attention::BlockOfQueries block;
  int batch, head, first_group;
};

template <class T>
struct AttendShared {
  T q[kAttenders][kGroupRows * kHeadColumns];
  T k[kKeyStages][kKeys * kHeadColumns];
  T v[kKeyStages][kKeys * kHeadColumns];
  uint64_t q_full[kAttenders], q_empty[kAttenders];
  Pipeline<kKeyStages> k_pipe, v_pipe;
  uint64_t v_raw;  // values have come with padding behind them
  // Of the tile under way, and of the next. It is written again when the leaders of all warpgroups have released a
  // later tile's queries, and they have met their warps since: compute-sanitizer's racecheck (CUDA 13.0) does not
  // follow that order, and reports the second use of a stage as a race.
  Announced announced[2];

  __device__ void init() {
    mbarrier_init(&v_raw, 1);
    for (int w = 0; w < kAttenders; ++w) mbarrier_init(&q_full[w], 1), mbarrier_init(&q_empty[w], 1);
    k_pipe.init(kAttenders);
    v_pipe.init(kAttenders);
  }
};

// Which group of its band a warpgroup has in tile `number` of its block. They swap from tile to tile: under a
// causal mask the last rows cost most.
__device__ inline int group_of(int warpgroup, int number) {
  return number % 2 == 0 ? warpgroup : kAttenders - 1 - warpgroup;
}

__device__ inline int tiles_of_keys(const attention::BlockOfQueries& block) {
  return max(block.seen_by(block.queries - 1) + kKeys - 1, 0) / kKeys;
}

// By a warp: draws tiles, and loads for each the queries, a stage for each warpgroup, and all keys and values.
template <class T>
__device__ void produce_attention(AttendShared<T>& shared, const attention::Args& a, const Order& order,
                                  const Counters& counters, const attention::Maps& maps) {
  const int lane = static_cast<int>(threadIdx.x % kWarpSize);
  const bool leader = lane == 0;
  PipelineState<kKeyStages> ring;
  const auto count = static_cast<unsigned>(order.attention_tiles());
  const auto draw = [&] { return leader ? atomicAdd(counters.drawn_attention, 1u) : 0; };
  const auto wait_for_stage = [&](int warpgroup, int number) {
    mbarrier_wait(&shared.q_empty[warpgroup], number % 2 ^ 1);
  };
  int number = 0, raw_phase = 0;
  for (unsigned next = draw();; ++number) {
    const unsigned drawn = __shfl_sync(kFullWarp, next, 0);
    if (drawn >= count) break;
    next = draw();  // its answer takes time
    const Band band = order.band(static_cast<int>(drawn) / order.heads);
    const int head = static_cast<int>(drawn) % order.heads;
    const attention::BlockOfQueries block(a, int64_t{band.batch} * order.heads + head,
                                          int64_t{band.first_group} * kGroupRows, band.groups * kGroupRows);
    const int last = tiles_of_keys(block) - 1;
    // TMA fills up with zeros what lies beyond the tensor, but padding may hold NaN, which a weight of 0 would not make
    // 0: behind the last keys it is cleared before anyone reads it.
    int filled = kKeys;  // rows of the tile that are no padding
    if (last >= 0 && block.first_key + block.keys < a.k_length) filled = min(block.keys - last * kKeys, kKeys);
    for (int j = last; j >= min(last, 0); --j) {
      const int key = block.first_key + j * kKeys;
      if (j >= 0 && leader) {
        shared.k_pipe.producer_acquire(ring, sizeof shared.k[0]);
        tma_load(shared.k[ring.index], &maps.k, &shared.k_pipe.full[ring.index], 0, key, head, band.batch);
      }
      if (j == last && leader) {  // the queries after the first keys: their stages are free later
        for (int w = 0; w < kAttenders; ++w) wait_for_stage(w, number);
        shared.announced[number % 2] = {block, band.batch, head, band.first_group};
        for (int w = 0; w < kAttenders; ++w) {
          const int group = group_of(w, number);
          if (group >= band.groups) {
            mbarrier_arrive(&shared.q_full[w]);
            continue;
          }
          mbarrier_arrive_expect_tx(&shared.q_full[w], sizeof shared.q[w]);
          tma_load(shared.q[w], &maps.q, &shared.q_full[w], 0, block.first + group * kGroupRows, head, band.batch);
        }
      }
      if (j < 0) break;
      if (leader) {
        uint64_t* const full = filled < kKeys ? &shared.v_raw : &shared.v_pipe.full[ring.index];
        shared.v_pipe.producer_acquire(ring);
        mbarrier_arrive_expect_tx(full, sizeof shared.v[0]);
        tma_load(shared.v[ring.index], &maps.v, full, 0, key, head, band.batch);
      }
      if (filled < kKeys) {
        mbarrier_wait(&shared.v_raw, raw_phase);
        raw_phase ^= 1;
#pragma unroll 1  // this warp has few registers
        for (int i = filled * kHeadColumns + lane * 8; i < kKeys * kHeadColumns; i += kWarpSize * 8) {
          store_vector(shared.v[ring.index] + i, Vector<T, 8>{});  // rows whole, wherever their chunks lie
        }
        filled = kKeys;
        tma_store_fence();
        __syncwarp();
        if (leader) shared.v_pipe.producer_commit(ring);
      }
      ring.advance();
    }
  }
  if (!leader) return;
  for (int w = 0; w < kAttenders; ++w) wait_for_stage(w, number);
  shared.announced[number % 2].block.head = -1;
  for (int w = 0; w < kAttenders; ++w) mbarrier_arrive(&shared.q_full[w]);
}

// Of four neighbouring lanes, lane j's word[i] and lane i's word[j] are exchanged.
__device__ __forceinline__ void transpose_in_quad(uint32_t (&word)[4]) {
#pragma unroll
  for (int apart = 1; apart <= 2; apart *= 2) {
    const bool upper = (threadIdx.x & apart) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & apart) != 0) continue;
      const uint32_t other = __shfl_xor_sync(kFullWarp, upper ? word[i] : word[i + apart], apart);
      (upper ? word[i] : word[i + apart]) = other;
    }
  }
}

// Stores a warpgroup's 64 rows, which lie as wgmma leaves them: of each eight columns a lane has two, and its quad all.
// to: where the group's first row begins. rows, columns: those that exist.
template <class T>
__device__ __forceinline__ void store_output(T* to, int64_t stride, int rows, int columns,
                                             const float (&out)[kHeadColumns / 2], const float (&factor)[2]) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = static_cast<int>(threadIdx.x) / kWarpSize % 4 * 16 + lane / 4 + 8 * r;
#pragma unroll
    for (int first = 0; first < kHeadColumns; first += 32) {
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = out + (first / 8 + i) * 4 + 2 * r;
        word[i] = pack<T>(pair[0] * factor[r], pair[1] * factor[r]);
      }
      transpose_in_quad(word);
      const int column = first + lane % 4 * 8;
      if (row < rows && column < columns) {
        *reinterpret_cast<uint4*>(to + row * stride + column) = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }
}

// Of a warpgroup's rows, which begin at `first_row` of the block, where anybody wants it.
__device__ __forceinline__ void store_log_sum_exp(const attention::Args& a, const attention::BlockOfQueries& block,
                                                  int first_row, const attention::RowsSoftmax& softmax) {
  const int lane = threadIdx.x % kWarpSize;
  if (a.lse == nullptr || lane % 4 != 0) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + static_cast<int>(threadIdx.x) / kWarpSize % 4 * 16 + lane / 4 + 8 * r;
    if (row >= block.queries) continue;
    static_cast<float*>(a.lse)[int64_t{block.head} * a.q_length + block.first + row] =
        softmax.log_sum_exp(r, static_cast<float>(a.scale));
  }
}

// By a warpgroup.
template <class T>
__device__ void attend(AttendShared<T>& shared, const attention::Args& a, const Order& order,
                       const Counters& counters) {
  using attention::issue_output;
  using attention::issue_scores;
  using attention::mask_scores;
  const int warpgroup = warpgroup_of_block();
  const bool leader = leads_warpgroup(warpgroup);
  const float scale = static_cast<float>(a.scale * kLog2e);
  PipelineState<kKeyStages> ring;
  unsigned* stored = nullptr;     // the counter of the rows that were stored last
  const auto tell_stored = [&] {  // under a product: the release waits until they are in memory
    if (leader && stored != nullptr) add_release(stored, 1u);
    stored = nullptr;
  };
  for (int number = 0;; ++number) {
    mbarrier_wait(&shared.q_full[warpgroup], number % 2);
    const Announced& announced = shared.announced[number % 2];
    const attention::BlockOfQueries block = attention::in_all_lanes(announced.block);
    if (block.head < 0) break;
    const int first_row = group_of(warpgroup, number) * kGroupRows;
    const auto* const q = &shared.q[warpgroup];

    attention::RowsSoftmax softmax;
    float out[kHeadColumns / 2] = {};
    float factor[2];
    uint32_t weight[kKeys / 16][4];

    int j = tiles_of_keys(block) - 1;
    const int seen = first_row < block.queries ? block.seen_by(first_row + kGroupRows - 1) : 0;
    for (; j >= 0 && j * kKeys >= seen; --j, ring.advance()) {  // its queries see none of these, or there are none
      attention::skip_tile(shared, ring, leader);
    }
    if (j < 0) {
      // Without a product it is this that makes sure that all have seen their queries come, before the next ones may.
      named_barrier_sync(1 + warpgroup, kWarpgroupSize);
      if (leader) mbarrier_arrive(&shared.q_empty[warpgroup]);
    } else {
      {
        float score[kKeys / 2];
        shared.k_pipe.consumer_wait(ring);
        wgmma_fence();
        issue_scores<kHeadColumns, kKeys>(score, q, &shared.k[ring.index]);
        tell_stored();
        wgmma_wait<0>();
        if (leader) shared.k_pipe.consumer_release(ring.index);
        if (leader && j == 0) mbarrier_arrive(&shared.q_empty[warpgroup]);
        mask_scores(score, block, first_row, j * kKeys);
        softmax.weigh(score, scale, factor);  // the factor meets an output of zeros
        attention::pack_weights<T>(score, weight);
      }
      // Both products at once, and the softmax while they run.
      const auto step = [&](auto masked) {
        const PipelineState<kKeyStages> before = ring;
        ring.advance();
        float score[kKeys / 2];
        shared.v_pipe.consumer_wait(before);
        shared.k_pipe.consumer_wait(ring);
        wgmma_fence();
        issue_scores<kHeadColumns, kKeys>(score, q, &shared.k[ring.index]);
        issue_output<kHeadColumns, kKeys>(out, weight, &shared.v[before.index]);
        wgmma_wait<1>();  // the scores
        if (leader) shared.k_pipe.consumer_release(ring.index);
        if (leader && j == 0) mbarrier_arrive(&shared.q_empty[warpgroup]);
        if constexpr (decltype(masked)::value) mask_scores(score, block, first_row, j * kKeys);
        const bool raised = softmax.weigh(score, scale, factor);
        wgmma_wait<0>();  // the output: the weights' registers are free, and the factor may be applied
        if (leader) shared.v_pipe.consumer_release(before.index);
        if (raised) {
#pragma unroll
          for (int i = 0; i < kHeadColumns / 2; ++i) out[i] *= factor[i / 2 % 2];
        }
        attention::pack_weights<T>(score, weight);
      };
      const int all_see = block.seen_by(first_row);  // its first query sees the least
      for (--j; j >= 0 && (j + 1) * kKeys > all_see; --j) step(std::true_type{});
      for (; j >= 0; --j) step(std::false_type{});
      shared.v_pipe.consumer_wait(ring);
      wgmma_fence();
      issue_output<kHeadColumns, kKeys>(out, weight, &shared.v[ring.index]);
      wgmma_wait<0>();
      if (leader) shared.v_pipe.consumer_release(ring.index);
      ring.advance();
    }
    tell_stored();  // where there was no product under which it could be done

    const int rows = block.queries - first_row;
    if (rows > 0) {
      float inverse[2];
      softmax.finish(inverse);
      const int batch = warp_uniform(announced.batch),
                group = warp_uniform(announced.first_group) + first_row / kGroupRows;
      T* const to = static_cast<T*>(a.out) + batch * a.out_stride.batch +
                    warp_uniform(announced.head) * a.out_stride.head + int64_t{group} * kGroupRows * a.out_stride.seq;
      store_output(to, a.out_stride.seq, rows, static_cast<int>(a.head_dim), out, inverse);
      tma_global_fence();  // TMA is to read it
      store_log_sum_exp(a, block, first_row, softmax);
      stored = counters.attended + batch * order.groups + group;
    }
    // All have stored, and have read what was announced: without a product none of them waits for the others.
    named_barrier_sync(1 + warpgroup, kWarpgroupSize);
  }
  tell_stored();
}

}  // namespace kf::KF_BACKEND::attention_block
