// A block of v4_clusters: what a launch is given, what is in shared memory, and the warps that do not compute. They
// bring weights, and find LayerNorms' numbers.
#pragma once

#include <step2/cluster.h>
#include <step2/mbarrier.h>
#include <step2/warpgroup.h>

#include "cluster_pack.h"
#include "rungs.h"
#include "token_block.h"

namespace kf::KF_BACKEND::decode_step {

// Eight warps compute. A third warpgroup gives them most of its registers; one of its warps finds mean and factor of
// LayerNorms while the eight multiply, one or two bring weights, the others end at once.
constexpr int kComputing = kClusterWarps * kWarpSize, kClusterThreads = kComputing + kWarpgroupSize;
constexpr int kHelpingRegisters = 40, kComputingRegisters = 232;
constexpr int kNormWarp = kClusterWarps;  // those that bring weights are behind it
// Up to 1024 columns time goes by in waiting: what will be needed comes to registers as early as there is room. Of
// wider models memory is the limit: one warp does not ask fast enough, more is on its way, and no warp waits for
// another one's weights.
KF_BOTH constexpr bool narrow(int steps) { return steps <= 16; }
KF_BOTH constexpr int bringing_warps(int steps) { return narrow(steps) ? 1 : 2; }
constexpr int kComputingOnly = 1, kAskedForX = 2, kNorm = 3;  // named barriers; the last one for each half
enum Half { kAttention, kMlp };                               // of a layer: what is added to x

struct ClusterToken {
  Args a;
  Shares s;
  unsigned char* packed;
  float scale_log2, eps;
  long long* trace;  // [blocks, trace_of_block], or null
};

// A recorded token (pages/token_trace.cu): when a block's first warp had x, had sent its rows of q k v, and so on, of
// each layer. In front as of v3_persistent.
enum class Step {
  kX,
  kQkvSent,
  kQkv,
  kAttendedSent,
  kAttended,
  kPartSent,
  kParts,
  kSent,
  kMiddleX,
  kHiddenSent,
  kHidden,
  kSecondSent,
  kSecondParts,
  kEnd
};
constexpr int kStepKinds = 14;
KF_BOTH int64_t trace_of_block(const Shares& s) { return 4 + int64_t{s.layers} * kStepKinds; }

template <int kSteps, int kBatch>
struct alignas(128) ClusterShared {
  static constexpr int kHeads = most_heads(kSteps);
  using Part = float2[kHead / 2 + 1];  // of attention: sums of values, then maximum and sum of weights

  unsigned char ring[kClusterWarps][ring_bytes(kSteps, kBatch)];
  unsigned char constants[kClusterWarps][2][Shares::kConstantBytes];
  // Operand b, a granule in 16 bytes: the upper parts of its four values, then the lower ones.
  unsigned char x[2][kBatch][kSteps * 16 * 16];
  unsigned char hidden[kBatch][most_units(kSteps) * 16 * 16];
  float qkv[kBatch][kHeads][3 * kHead];
  float2 moments[2][kBatch][kOfCluster];  // of each warp's columns: mean, Σ (x − mean)²
  Part attended[kBatch][kHeads][kClusterBlocks], of_warps[kBatch][kHeads][kClusterWarps];
  float sums[kBatch][kClusterWarps];
  uint64_t full[kClusterWarps][kMostPieces], empty[kClusterWarps][kMostPieces], constants_full[kClusterWarps];
  float2 norm[2][kBatch];  // mean and factor of x
  Place places[kBatch];
  uint64_t x_full[2], moments_full[2], norm_full[2], qkv_full, attended_full, hidden_full;
};

// Rings have what is left of it.
constexpr size_t kMostShared = sizeof(ClusterShared<20, 1>);
template <int... kSteps>
constexpr bool all_fit() {
  return kMostShared <= 227 * 1024 &&
         ((sizeof(ClusterShared<kSteps, 1>) <= kMostShared && sizeof(ClusterShared<kSteps, 2>) <= kMostShared &&
           sizeof(ClusterShared<kSteps, 4>) <= kMostShared &&
           sizeof(ClusterShared<kSteps, most_batch(kSteps)>) <= kMostShared) &&
          ...);
}
static_assert(all_fit<12, 16, 20, 25>());

// PTX: ld.relaxed.gpu.u64
__device__ __forceinline__ unsigned long long load_sum(const unsigned long long* from) {
  unsigned long long value = 0;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

// How many columns of x a warp has.
__device__ __forceinline__ float columns(const Shares& s, int index) {
  const Range own = s.granules_of(index);
  return static_cast<float>(max(0, min(own.count() * kGranule, s.width - own.first * kGranule)));
}

// Brings a warp's weights in the order of their use. A lane does it for a warp; lanes behind the last warp's have
// nothing to bring, but go along.
template <int kSteps, int kBatch>
__device__ __forceinline__ void bring_weights(const ClusterToken& token, ClusterShared<kSteps, kBatch>& shared,
                                              const WarpPlace& at, int for_warp) {
  const Shares& s = token.s;
  const WarpPlace of{at.cluster, at.block, min(for_warp, kClusterWarps - 1)};
  const unsigned char* from = token.packed + s.stream_at(of);
  const uint64_t once = evict_first();
  NextPiece<kSteps, kBatch> next(s, of);
  const unsigned all = for_warp < kClusterWarps ? next.all() : 0;
  const auto done = [](uint64_t (&barriers)[kMostPieces], unsigned piece) {
    return mbarrier_test_wait(&barriers[piece % kMostPieces], piece / kMostPieces & 1);
  };
  __syncwarp();
  named_barrier_sync(kAskedForX, kComputing + bringing_warps(kSteps) * kWarpSize);
  // Who has room goes on: none waits for another's. Pieces in front of the first one count as used, and as there.
#pragma unroll 1
  while (__any_sync(kFullWarp, next.index < all)) {
    // Two are on their way, 5 to 8 MB of all warps: what is needed at once would wait behind more. A warp of a wide
    // model that has used up half of its ring waits for weights alone, and may ask for four. With four rows a ring has
    // no more.
    const auto few = [&] {
      if (done(shared.full[of.warp], next.index - 2)) return true;
      return !narrow(kSteps) && done(shared.empty[of.warp], next.index - 6) &&
             done(shared.full[of.warp], next.index - 4);
    };
    const bool can = next.index < all && done(shared.empty[of.warp], next.used.index - 1) && few();
    if (!__any_sync(kFullWarp, can)) __nanosleep(20);
    if (!can) continue;
    uint64_t* const full = &shared.full[of.warp][next.index % kMostPieces];
    const int bytes = next.steps.of_piece * kStepBytes;
    mbarrier_arrive_expect_tx(full, bytes);
    bulk_load(shared.ring[of.warp] + next.first, from, bytes, full, once);
    from += bytes;
    next.go_on();
  }
}

// How many rows there are: of a launch for one the compiler knows it.
template <int kBatch>
__device__ __forceinline__ int rows_of(const Args& a) {
  return kBatch == 1 ? 1 : static_cast<int>(a.batch);
}

// Each row's sum over lanes that are kFirst, or a multiple, apart: lane i gets that of row i / kFirst % kRows. Where
// two lanes have the same rows, each keeps half of them and gives the others away.
template <int kFirst, int kRows>
__device__ __forceinline__ float of_own_row(float (&of_row)[kRows], int lane) {
  int left = kRows;
#pragma unroll
  for (int apart = kFirst; apart < kWarpSize; apart *= 2) {
    if (apart >= kFirst * kRows) {
      of_row[0] += __shfl_xor_sync(kFullWarp, of_row[0], apart);
      continue;
    }
    left /= 2;
    const bool odd = (lane & apart) != 0;
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      if (i >= left) continue;
      const float give = odd ? of_row[2 * i] : of_row[2 * i + 1];
      of_row[i] = (odd ? of_row[2 * i + 1] : of_row[2 * i]) + __shfl_xor_sync(kFullWarp, give, apart);
    }
  }
  return of_row[0];
}

// Mean and factor of each row's x for each LayerNorm, by a warp, from the moments of 64 warps' columns.
template <int kSteps, int kBatch>
__device__ __forceinline__ void find_norms(const ClusterToken& token, ClusterShared<kSteps, kBatch>& shared) {
  const int lane = threadIdx.x % kWarpSize, batch = rows_of<kBatch>(token.a);
  State* const state = reinterpret_cast<State*>(token.packed);
  const float inverse = 1.0f / static_cast<float>(token.s.width);
  const float count_1 = columns(token.s, lane), count_2 = columns(token.s, lane + kWarpSize);
  const auto announce = [&](uint64_t* barrier) {
    if (lane == 0) mbarrier_arrive_expect_tx(barrier, batch * static_cast<int>(sizeof(shared.moments[0][0])));
  };
  for (uint64_t& each : shared.moments_full) announce(&each);
  bool came = true;
#pragma unroll 1
  for (int i = 0; i <= 2 * token.s.layers; ++i) {
    const int half = i % 2 == 0 ? kMlp : kAttention, phase = i / 2;
    uint64_t* const barrier = &shared.moments_full[half];
    came = came && wait_for_phase<true>(barrier, phase & 1, state, Wanted::kX, phase);
    float sums[kBatch], squares[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const auto& moments = shared.moments[half][min(b, batch - 1)];
      const float2 one = moments[lane], two = moments[lane + kWarpSize];
      // About one of the means: sums lose no digits.
      const float about = moments[0].x, apart_1 = one.x - about, apart_2 = two.x - about;
      const float sum_1 = count_1 * apart_1, sum_2 = count_2 * apart_2;
      sums[b] = sum_1 + sum_2;
      squares[b] = (one.y + sum_1 * apart_1) + (two.y + sum_2 * apart_2);
    }
    const float sum = inverse * of_own_row<1>(sums, lane);
    const float variance = fmaxf(of_own_row<1>(squares, lane) * inverse - sum * sum, 0.0f);
    if (lane < batch) {
      const float mean = shared.moments[half][lane][0].x + sum;
      shared.norm[half][lane] = {came ? mean : NAN, came ? rsqrtf(variance + token.eps) : NAN};
    }
    __syncwarp();
    if (narrow(kSteps)) {  // it goes along with the others, also where moments come that hold nobody back
      named_barrier_sync(kNorm + half, kComputing + kWarpSize);
    } else if (lane == 0) {
      mbarrier_arrive(&shared.norm_full[half]);
    }
    if (came) announce(barrier);
  }
}

}  // namespace kf::KF_BACKEND::decode_step
