// What the warps of v4_clusters do: who brings weights and finds norms; products, x and what is added to it, attention,
// the MLP.
#pragma once

#include <step1/approximate.h>
#include <step1/gelu.h>
#include <step2/cluster.h>
#include <step2/dependent_launch.h>
#include <step2/mma.h>
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

template <int kSteps>
struct alignas(128) ClusterShared {
  static constexpr int kHeads = most_heads(kSteps);
  using Part = float2[kHead / 2 + 1];  // of attention: sums of values, then maximum and sum of weights

  unsigned char ring[kClusterWarps][ring_bytes(kSteps)];
  unsigned char constants[kClusterWarps][2][Shares::kConstantBytes];
  // Operand b, a granule in 16 bytes: the upper parts of its four values, then the lower ones.
  unsigned char x[2][kSteps * 16 * 16];
  unsigned char hidden[most_units(kSteps) * 16 * 16];
  float qkv[kHeads][3 * kHead];
  float2 moments[2][kOfCluster];  // of each warp's columns: mean, Σ (x − mean)²
  Part attended[kHeads][kClusterBlocks], of_warps[kHeads][kClusterWarps];
  float sums[kClusterWarps];
  uint64_t full[kClusterWarps][kMostPieces], empty[kClusterWarps][kMostPieces], constants_full[kClusterWarps];
  float2 norm[2];  // mean and factor of x
  uint64_t x_full[2], moments_full[2], norm_full[2], qkv_full, attended_full, hidden_full;
};

// Rings have what is left of it.
constexpr size_t kMostShared = sizeof(ClusterShared<20>);
static_assert(kMostShared <= 227 * 1024 && sizeof(ClusterShared<12>) <= kMostShared &&
              sizeof(ClusterShared<16>) <= kMostShared && sizeof(ClusterShared<25>) <= kMostShared);

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
template <int kSteps>
__device__ __forceinline__ void bring_weights(const ClusterToken& token, ClusterShared<kSteps>& shared,
                                              const WarpPlace& at, int for_warp) {
  const Shares& s = token.s;
  const WarpPlace of{at.cluster, at.block, min(for_warp, kClusterWarps - 1)};
  const unsigned char* from = token.packed + s.stream_at(of);
  const uint64_t once = evict_first();
  NextPiece<kSteps> next(s, of);
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
    // model that has used up half of its ring waits for weights alone, and may ask for four.
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

// Mean and factor of x for each LayerNorm, by a warp, from the moments of 64 warps' columns.
template <int kSteps>
__device__ __forceinline__ void find_norms(const ClusterToken& token, ClusterShared<kSteps>& shared) {
  const int lane = threadIdx.x % kWarpSize;
  State* const state = reinterpret_cast<State*>(token.packed);
  const float inverse = 1.0f / static_cast<float>(token.s.width);
  const float count_1 = columns(token.s, lane), count_2 = columns(token.s, lane + kWarpSize);
  const auto announce = [&](uint64_t* barrier) {
    if (lane == 0) mbarrier_arrive_expect_tx(barrier, static_cast<int>(sizeof(shared.moments[0])));
  };
  for (uint64_t& each : shared.moments_full) announce(&each);
  bool came = true;
#pragma unroll 1
  for (int i = 0; i <= 2 * token.s.layers; ++i) {
    const int half = i % 2 == 0 ? kMlp : kAttention, phase = i / 2;
    uint64_t* const barrier = &shared.moments_full[half];
    came = came && wait_for_phase<true>(barrier, phase & 1, state, Wanted::kX, phase);
    const float2 one = shared.moments[half][lane], two = shared.moments[half][lane + kWarpSize];
    // About one of the means: sums lose no digits.
    const float about = shared.moments[half][0].x, apart_1 = one.x - about, apart_2 = two.x - about;
    const float sum_1 = count_1 * apart_1, sum_2 = count_2 * apart_2;
    float sum = sum_1 + sum_2, squares = (one.y + sum_1 * apart_1) + (two.y + sum_2 * apart_2);
#pragma unroll
    for (int apart = 1; apart < kWarpSize; apart *= 2) {
      sum += __shfl_xor_sync(kFullWarp, sum, apart);
      squares += __shfl_xor_sync(kFullWarp, squares, apart);
    }
    sum *= inverse;
    const float variance = fmaxf(squares * inverse - sum * sum, 0.0f);
    if (lane == 0) {
      shared.norm[half] = {came ? about + sum : NAN, came ? rsqrtf(variance + token.eps) : NAN};
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

// kTrace: it records when it is where.
template <class T, int kSteps, bool kTrace>
struct ClusterWarp {
  using Shared = ClusterShared<kSteps>;
  using Operand = Vector<uint32_t, 2>;  // b, a step's
  static constexpr int kGroups = most_granules(kSteps);
  static constexpr int kMostUnits = most_units(kSteps), kHeads = most_heads(kSteps);
  static constexpr bool kEven = kSteps * 16 % kOfCluster == 0;  // all warps have as many granules
  static constexpr bool kNarrow = narrow(kSteps);

  const ClusterToken& token;
  const Args& a;
  const Shares& s;
  Shared& shared;
  State* const state;
  const Place place;
  const uint32_t epoch;  // launches before
  const int set;         // of sums, in this one
  const int lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
  const WarpPlace at;
  const Range heads, keys;    // of the cluster; before the new one
  const int units, granules;  // of the cluster's hidden layer; of the warp's columns of x
  const int first_granule;
  const int qkv_tiles, fc_tiles;
  const uint32_t peer;       // a lane's block of the cluster, where it sends to: its shared memory
  const int row;             // of each group, of which a lane has x. Eight lanes have the same, for a block each
  const float inverse_here;  // of how many this one has, or 0
  uint32_t real = 0;         // bit i: whether the lane's column of group i is one of x
  float residual[kGroups] = {};
  bool broken = false;     // it waited in vain: what it gives is NaN
  int layer = 0;           // in which it is
  float units_of_one = 0;  // of sums, in this half of the layer
  Walk used;               // of the ring

  __device__ __forceinline__ ClusterWarp(const ClusterToken& token, Shared& shared, const Place& place, uint32_t epoch,
                                         const WarpPlace& at)
      : token(token),
        a(token.a),
        s(token.s),
        shared(shared),
        state(reinterpret_cast<State*>(token.packed)),
        place(place),
        epoch(epoch),
        set(static_cast<int>(epoch % 2)),
        at(at),
        heads(token.s.heads_of(at.cluster)),
        keys(Shares::keys(warp_uniform(place.before()), at.index())),
        units(token.s.units_of(at.cluster).count()),
        granules(kEven ? kGroups : granules_of(kSteps, at.index()).count()),
        first_granule(granules_of(kSteps, at.index()).first),
        qkv_tiles(token.s.tiles(at, Kind::kQkv)),
        fc_tiles(token.s.tiles(at, Kind::kFc)),
        peer(remote_address(&shared, lane % kClusterBlocks)),
        row(lane / kClusterBlocks),
        inverse_here(1.0f / fmaxf(columns(token.s, at.index()), 1.0f)) {
    for (int i = 0; i < kGroups; ++i) real |= static_cast<uint32_t>(column_of_x(i) >= 0) << i;
  }
  // Of a lane's group, or −1.
  __device__ __forceinline__ int column_of_x(int group) const {
    return decode_step::column_of_x(granules_of(kSteps, at.index()), s.width, group, row);
  }

  __device__ __forceinline__ void record(int64_t at, long long value) const {
    if constexpr (kTrace) {
      if (threadIdx.x == 0) token.trace[blockIdx.x * trace_of_block(s) + at] = value;
    }
  }
  __device__ __forceinline__ void record(Step step) const {
    if constexpr (kTrace) record(4 + layer * kStepKinds + static_cast<int>(step), clock64());
  }
  __device__ __forceinline__ void record_both_clocks(int at) const {
    if constexpr (kTrace) {
      record(at, all_reduce::nanoseconds());
      record(at + 1, clock64());
    }
  }

  // ---- exchanges within the cluster ----

  __device__ __forceinline__ uint32_t there(uint32_t peer, const void* here) const {
    return peer + (smem_address(here) - smem_address(&shared));
  }
  // How many bytes come in a phase. There is one phase a layer, so the layer's number says its parity.
  static constexpr int kBytesOfX = kSteps * 16 * 16;
  __device__ __forceinline__ int bytes_of_qkv() const { return heads.count() * 3 * kHead * 4; }
  __device__ __forceinline__ int bytes_of_attended() const {
    return heads.count() * kClusterBlocks * static_cast<int>(sizeof(typename Shared::Part));
  }
  __device__ __forceinline__ int bytes_of_hidden() const { return units * 16 * 16; }
  __device__ __forceinline__ void expect(uint64_t* barrier, int bytes) const {
    if (at.warp == 0 && lane == 0) mbarrier_arrive_expect_tx(barrier, bytes);
  }
  __device__ __forceinline__ void expect_all() const {
#pragma unroll
    for (uint64_t& each : shared.x_full) expect(&each, kBytesOfX);
    expect(&shared.qkv_full, bytes_of_qkv());
    expect(&shared.attended_full, bytes_of_attended());
    expect(&shared.hidden_full, bytes_of_hidden());
  }
  __device__ __forceinline__ void wait(uint64_t* barrier, int phase, int bytes, Wanted wanted) {
    // Behind a phase that has not come the next one would look complete.
    broken = broken || !wait_for_phase<true>(barrier, phase & 1, state, wanted, phase);
    if (!broken) expect(barrier, bytes);
  }
  __device__ __forceinline__ void wait_for_x(int half, int phase) {
    wait(&shared.x_full[half], phase, kBytesOfX, Wanted::kX);
  }
  // A tile's four rows, of lanes 0, 4, 8 and 12, to a lane's block.
  __device__ __forceinline__ static void four_rows(float mine, float (&of_row)[kGranule]) {
#pragma unroll
    for (int i = 0; i < kGranule; ++i) of_row[i] = __shfl_sync(kFullWarp, mine, 4 * i);
  }
  __device__ __forceinline__ void send(const uint32_t (&words)[4], const void* to, uint64_t* barrier) const {
    store_remote_async(there(peer, to), words, there(peer, barrier));
  }
  // Four values as a granule of operand b.
  __device__ __forceinline__ void send_granule(float a, float b, float c, float d, unsigned char* to,
                                               uint64_t* barrier) const {
    uint32_t words[4];
    granule(a, b, c, d, words);
    send(words, to, barrier);
  }
  __device__ __forceinline__ static void granule(float a, float b, float c, float d, uint32_t (&words)[4]) {
    const TwoParts one = two_parts<T>(a, b), two = two_parts<T>(c, d);
    words[0] = one.high, words[1] = two.high, words[2] = one.low, words[3] = two.low;
  }

  // ---- the stream of weights ----

  using Weights = Vector16[kSteps];  // a tile's
  // So many steps, of at most N. The others are zeros, or what lies in the room of a larger piece: nobody multiplies
  // them, but what is not set in each turn of a loop keeps its registers.
  template <int N>
  __device__ __forceinline__ void take(int steps, Vector16 (&w)[N]) {
    constexpr int kPiece = piece_of(N);
    constexpr bool kExact = exact_room(kSteps) && N < kSteps;  // of a tile all steps are there, or none
#pragma unroll
    for (int first = 0; first < N; first += kPiece) {
      const bool any = first < steps;
      const unsigned place = used.index % kMostPieces;
      const unsigned char* piece = nullptr;  // a lane's first vector of it
      if (any) {
        mbarrier_wait_warp(&shared.full[at.warp][place], used.index / kMostPieces & 1);
        piece =
            shared.ring[at.warp] + used.next((kExact ? steps : kPiece) * kStepBytes, ring_bytes(kSteps)) + lane * 16;
      }
#pragma unroll
      for (int i = first; i < first + kPiece; ++i) {
        w[i] = (kExact ? i < steps : any) ? load_16(piece + (i - first) * kStepBytes) : Vector16{};
      }
      if (!any) continue;
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&shared.empty[at.warp][place]);
    }
  }
  // A tile's, or none.
  __device__ __forceinline__ void take(bool any, Weights& w) {
    if (any) {
      take<kSteps>(kSteps, w);
    } else {
#pragma unroll
      for (Vector16& each : w) each = {};
    }
  }
  __device__ __forceinline__ void bring_constants(int of_layer) const {
    if (of_layer >= s.layers || lane != 0) return;
    uint64_t* const barrier = &shared.constants_full[at.warp];
    mbarrier_arrive_expect_tx(barrier, Shares::kConstantBytes);
    bulk_load(shared.constants[at.warp][of_layer & 1], token.packed + s.constants_of(at, of_layer),
              Shares::kConstantBytes, barrier);
  }
  __device__ __forceinline__ void take_constants(int of_layer) {
    layer = of_layer;
    mbarrier_wait_warp(&shared.constants_full[at.warp], layer & 1);
    bring_constants(layer + 1);
  }
  __device__ __forceinline__ void begin() {
    expect_all();
    bring_constants(0);
  }
  __device__ __forceinline__ float2 of_row(int tile) const {
    return reinterpret_cast<const float2*>(shared.constants[at.warp][layer & 1])[tile * kGranule + g % kGranule];
  }
  __device__ __forceinline__ void of_x(const unsigned char* constants, Shares::OfX which,
                                       float (&value)[kGroups]) const {
    const uint16_t* const first = reinterpret_cast<const uint16_t*>(constants + Shares::kRowBytes);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) value[i] = low_of<T>(first[which * Shares::kOfColumns + i * kGranule + row]);
  }

  // ---- products ----

  __device__ __forceinline__ static void multiply(float (&sum)[4], const Vector16& w, const Operand& x) {
    mma_m16n8k16<T>(sum, {w.element[0], w.element[1], w.element[2], w.element[3]}, {x.element[0], x.element[1]});
  }
  // A column of operand b: a chunk's upper or lower parts.
  __device__ __forceinline__ Operand operand(const unsigned char* x, int step) const {
    return load_vector<2>(reinterpret_cast<const uint32_t*>(x + (step * 16 + g / 2 * 4 + t) * 16 + g % 2 * 8));
  }
  // The sum of row g, in lanes where t is 0 and g < 4. Both parts lie in a lane.
  __device__ __forceinline__ float row_of(const float (&sum)[4]) const {
    float of_row = t < 2 ? sum[0] + sum[1] : sum[2] + sum[3];
    of_row += __shfl_xor_sync(kFullWarp, of_row, 2);         // chunks 0 and 2, or 1 and 3
    return of_row + __shfl_xor_sync(kFullWarp, of_row, 17);  // four rows on
  }
  // Of tile k; the first one's weights are there already.
  __device__ __forceinline__ void product(int k, Weights& w, const unsigned char* x, float (&sum)[4][4]) {
    if (k > 0) take<kSteps>(kSteps, w);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) multiply(sum[step % 4], w[step], operand(x, step));
  }
  __device__ __forceinline__ float row_of(float (&sum)[4][4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[0][i] = (sum[0][i] + sum[1][i]) + (sum[2][i] + sum[3][i]);
    return row_of(sum[0]);
  }
  // The same behind a LayerNorm of this mean and factor; `of_row`: the row's two numbers.
  __device__ __forceinline__ float normed_row(float (&sum)[4][4], float2 norm, float2 of_row) const {
    return norm.y * (row_of(sum) - norm.x * of_row.x) + of_row.y;
  }

  // ---- what clusters add to x ----

  // Sums of whole numbers, added up by the L2 cache: in whatever order clusters come, the result is the same. A unit is
  // between 2^-21 and 2^-20 of x's standard deviation, with LayerNorm's eps in it: finer than the two parts in which
  // products take x. The ten lowest bits count who has added, and who had no number; the others are what all added.
  static constexpr int kCountBits = 10, kUnitBits = 21;
  static constexpr unsigned long long kOne = 1, kNoNumber = 32;
  static constexpr float kMostUnitsOfPart = 0x1p49f;
  // Two to some power, for mean and factor of the LayerNorm in front.
  __device__ __forceinline__ void choose_unit(float2 norm) {
    units_of_one = __uint_as_float(__float_as_uint(norm.y) & 0x7f800000u) * static_cast<float>(1 << kUnitBits);
  }
  __device__ __forceinline__ unsigned long long* sums(int of_set, int half) const {
    return reinterpret_cast<unsigned long long*>(token.packed + s.sums_at(of_set, layer, half, at.index()));
  }
  template <int kHalf>
  __device__ __forceinline__ void publish(const float (&sum)[kGroups][4]) const {
    float value[kGroups];
#pragma unroll
    for (int i = 0; i < kGroups; ++i) value[i] = row_of(sum[i]);
    unsigned long long* const to = sums(set, kHalf) + g;
    if (lane < 16 && t == 0) {
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        const float in_units = value[i] * units_of_one;
        const bool number = fabsf(in_units) < kMostUnitsOfPart && !broken;
        const auto whole = static_cast<unsigned long long>(number ? __float2ll_rn(in_units) : 0);
        atomicAdd(to + kGranule * i, (whole << kCountBits) + (number ? kOne : kOne + kNoNumber));
      }
    }
  }
  // For the next launch. A cluster does it for all.
  __device__ __forceinline__ void clear_sums() const {
    if (layer % s.clusters != at.cluster) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (lane < kGranule * kGroups) sums(1 - set, half)[lane] = 0;
    }
  }

  // ---- x ----

  __device__ __forceinline__ float over_rows(float sum) const {
    sum += __shfl_xor_sync(kFullWarp, sum, kClusterBlocks);
    return sum + __shfl_xor_sync(kFullWarp, sum, 2 * kClusterBlocks);
  }
  // A warp's columns to all blocks of the cluster: times the next LayerNorm's gain, as operand b, and their moments.
  __device__ __forceinline__ void send_x(int half, const float (&gain)[kGroups]) {
    constexpr int kBase = kGroups / 4 * 4;
    unsigned char* const to = shared.x[half] + first_granule * 16;
    uint64_t* const barrier = &shared.x_full[half];
    // Of the moments: about one of the columns, so that no digits are lost however far they are from 0.
    const float about = __shfl_sync(kFullWarp, residual[0], 0);
    float sum = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const float apart = real >> i & 1 ? residual[i] - about : 0.0f;
      sum += apart;
      squares += apart * apart;
    }
    sum = over_rows(sum);
    squares = over_rows(squares);
    if (row == 0) {
      const Pair<float> moments{about + sum * inverse_here, squares - sum * sum * inverse_here};
      store_remote_async(there(peer, &shared.moments[half][at.index()]), moments,
                         there(peer, &shared.moments_full[half]));
    }
    float y[kBase + 4] = {};
#pragma unroll
    for (int i = 0; i < kGroups; ++i) y[i] = residual[i] * gain[i];
#pragma unroll
    for (int i = 0; i < kBase; i += 4) send_granule(y[i], y[i + 1], y[i + 2], y[i + 3], to + (i + row) * 16, barrier);
    // See column_in_warp.
    const int left = granules - kBase;
    if (left == 1) {
      float of[kGranule];
#pragma unroll
      for (int i = 0; i < kGranule; ++i)
        of[i] = __shfl_sync(kFullWarp, y[kBase], i * kClusterBlocks + lane % kClusterBlocks);
      if (row == 0) send_granule(of[0], of[1], of[2], of[3], to + kBase * 16, barrier);
    } else if (left == 2) {
      const float one = __shfl_down_sync(kFullWarp, y[kBase], 2 * kClusterBlocks);
      const float two = __shfl_down_sync(kFullWarp, y[kBase + 1], 2 * kClusterBlocks);
      if (row < 2) send_granule(y[kBase], y[kBase + 1], one, two, to + (kBase + row) * 16, barrier);
    } else if (left == 3) {
      const int which = lane % kClusterBlocks;
      const float last = __shfl_sync(kFullWarp, which == 0 ? y[kBase] : (which == 1 ? y[kBase + 1] : y[kBase + 2]),
                                     3 * kClusterBlocks + min(row, 2));
      if (row < 3) send_granule(y[kBase], y[kBase + 1], y[kBase + 2], last, to + (kBase + row) * 16, barrier);
    }
  }
  // Mean and factor of all of x. A named barrier is the sooner way to tell, but there all eight warps wait for each
  // other: in a wide model that is for weights.
  __device__ __forceinline__ float2 mean_and_factor(int half, int phase) {
    if constexpr (kNarrow) {
      named_barrier_sync(kNorm + half, kComputing + kWarpSize);
    } else {
      broken = broken || !wait_for_phase<true>(&shared.norm_full[half], phase & 1, state, Wanted::kX, phase);
    }
    return shared.norm[half];
  }
  // Until all have added. Lane 8·row + group looks at one sum; those left over at the last group's.
  __device__ __forceinline__ bool wait_for_sum(const unsigned long long* from, int senders,
                                               unsigned long long& got) const {
    for (uint32_t polls = 1;; ++polls) {
      got = load_sum(from);
      if (__all_sync(kFullWarp, static_cast<int>(got % kNoNumber) == senders)) return true;
      if (__builtin_expect(polls % kPollsBetweenLooks != 0, 1)) continue;
      if (__any_sync(kFullWarp, give_up(state, polls, Wanted::kX, layer))) return false;
    }
  }
  // The sums of half a layer, added to x.
  template <int kHalf>
  __device__ __forceinline__ void add_parts() {
    float bias[kGroups], gain[kGroups];
    of_x(shared.constants[at.warp][layer & 1], kHalf == kMlp ? Shares::kSecondBias : Shares::kBias, bias);
    of_x(shared.constants[at.warp][layer & 1], kHalf == kMlp ? Shares::kNextGain : Shares::kGain, gain);
    const float one = __uint_as_float((254u << 23) - __float_as_uint(units_of_one));  // its reciprocal: a power of two
    static_assert(kGroups <= kClusterBlocks);
    const int group = min(lane % kClusterBlocks, kGroups - 1);
    unsigned long long got = 0;
    broken |= !wait_for_sum(sums(set, kHalf) + kGranule * group + row, s.senders(kHalf), got);
    record(kHalf == kMlp ? Step::kSecondParts : Step::kParts);
    const bool number = got % (kOne << kCountBits) < kNoNumber && !broken;
    const float added = number ? static_cast<float>(static_cast<long long>(got) >> kCountBits) * one : NAN;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      residual[i] += __shfl_sync(kFullWarp, added, lane / kClusterBlocks * kClusterBlocks + i) + bias[i];
    }
    send_x(kHalf, gain);
  }
  // x begins with a mean of 0: LayerNorm, which is all that reads it, does not change, and its sums lose no digits.
  // What it needs comes from memory at the same time, also while blocks of the cluster begin.
  __device__ __forceinline__ void send_first_x(int64_t id) {
    const Tokens<T> tokens(a, place, id);
    constexpr int kOfThread = up(kSteps * kStepDepth, kComputing);
    float gain[kGroups], sum = 0;
    of_x(token.packed + s.constants_of(at, -1), Shares::kNextGain, gain);
    typename Tokens<T>::Parts all[kOfThread] = {}, own[kGroups] = {};
    const auto column_of = [](int i) { return i * kComputing + static_cast<int>(threadIdx.x); };
    if (tokens.exists()) {
#pragma unroll
      for (int i = 0; i < kOfThread; ++i) all[i] = tokens.parts(min(column_of(i), s.width - 1));
#pragma unroll
      for (int i = 0; i < kGroups; ++i) own[i] = tokens.parts(max(column_of_x(i), 0));
    }
    named_barrier_arrive(kAskedForX, kComputing + bringing_warps(kSteps) * kWarpSize);
    prefetch_keys(0);
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      if (column_of(i) < s.width) sum += all[i].sum();
    }
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      if (real >> i & 1) residual[i] = tokens.exists() ? own[i].sum() : NAN;
    }
    sum = warp_sum(sum);
    if (lane == 0) shared.sums[at.warp] = sum;
    named_barrier_sync(kComputingOnly, kComputing);
    float mean = 0;
#pragma unroll
    for (const float each : shared.sums) mean += each;
    mean /= static_cast<float>(s.width);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      if (real >> i & 1) residual[i] -= mean;
    }
    cluster_barrier_wait();  // all barriers of the cluster are there; what comes before it is announced counts, too
    send_x(kMlp, gain);
  }

  // ---- attention ----

  // Keys of a head: four lanes have one, each a quarter of its columns. Values: a lane has two columns of each.
  static constexpr int kRounds = kWarpKeys / 8;
  struct Cached {
    Vector16 k[kRounds][2];
    uint32_t v[kWarpKeys];
  };
  using OfKeys = Cached[kHeads];
  __device__ __forceinline__ void load_keys(OfKeys& of) const {
#pragma unroll
    for (int head = 0; head < kHeads; ++head) load_keys(head, of[head]);
  }
  __device__ __forceinline__ const T* cached(bool values, int of_layer, int head) const {
    return in_cache<const T>(values ? a.v_cache : a.k_cache, values ? a.v_stride : a.k_stride, of_layer, 0,
                             heads.first + head, place.begin + keys.first);
  }
  __device__ __forceinline__ void load_keys(int head, Cached& of) const {
    const int count = head < heads.count() ? keys.count() : 0;
    const T *const k = cached(false, layer, head), *const v = cached(true, layer, head);
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      if (r * 8 >= count) {
        of.k[r][0] = of.k[r][1] = {};
#pragma unroll
        for (int i = r * 8; i < r * 8 + 8; ++i) of.v[i] = 0;
        continue;
      }
      const T* const key = k + min(r * 8 + g, count - 1) * kHead + t * 8;
      of.k[r][0] = load_vector<4>(reinterpret_cast<const uint32_t*>(key));
      of.k[r][1] = load_vector<4>(reinterpret_cast<const uint32_t*>(key + kHead / 2));
#pragma unroll
      for (int i = r * 8; i < r * 8 + 8; ++i) {
        of.v[i] = *reinterpret_cast<const uint32_t*>(v + min(i, count - 1) * kHead + 2 * lane);
      }
    }
  }

  // Rows of q k v, or of fc, to the cluster: a LayerNorm behind the product.
  template <int kHalf>
  __device__ __forceinline__ void rows(Weights& w) {
    constexpr bool mlp = kHalf == kMlp;
    constexpr int of_x = 1 - kHalf;
    const int tiles = mlp ? fc_tiles : qkv_tiles;
    if (tiles == 0) {
      if (at.warp == 0) wait_for_x(of_x, layer);  // it announces the next one
      return choose_unit(mean_and_factor(of_x, layer));
    }
    const float scale = token.scale_log2 / (a.scale_by_layer ? static_cast<float>(layer + 1) : 1.0f);
    unsigned char* const to = mlp ? shared.hidden : reinterpret_cast<unsigned char*>(shared.qkv);
    uint64_t* const barrier = mlp ? &shared.hidden_full : &shared.qkv_full;
    wait_for_x(of_x, layer);
    record(mlp ? Step::kMiddleX : Step::kX);
    float2 norm{};
#pragma unroll 1
    for (int k = 0; k < tiles; ++k) {
      const float2 numbers = of_row(kHalf * kMostTiles + k);
      float sum[4][4] = {};
      product(k, w, shared.x[of_x], sum);
      if (k == 0) choose_unit(norm = mean_and_factor(of_x, layer));
      float y = normed_row(sum, norm, numbers);
      const int tile = Shares::tile(at, mlp ? Kind::kFc : Kind::kQkv, k);
      const int in_head = tile * kGranule % (3 * kHead), which = in_head / kHead;  // q, k or v: the same of its rows
      const T rounded = from_compute<T>(y);
      if constexpr (mlp) {
        y = a.tanh ? fast_gelu<T, true>(y) : fast_gelu<T, false>(y);
      } else {
        y = which == 0 ? scale * y : to_compute(rounded);
      }
      float of_tile[kGranule];
      four_rows(broken ? NAN : y, of_tile);
      if (row == 0) {
        uint32_t words[4];
        if constexpr (mlp) {
          granule(of_tile[0], of_tile[1], of_tile[2], of_tile[3], words);
        } else {
#pragma unroll
          for (int i = 0; i < kGranule; ++i) words[i] = __float_as_uint(of_tile[i]);
        }
        send(words, to + tile * 16, barrier);
      }
      if (!mlp && which > 0 && place.slot >= 0 && lane < 16 && t == 0) {
        T* const cache = in_cache<T>(which == 1 ? a.k_cache : a.v_cache, which == 1 ? a.k_stride : a.v_stride, layer, 0,
                                     heads.first + tile * kGranule / (3 * kHead), place.slot);
        cache[in_head % kHead + g] = rounded;  // read by later launches only
      }
    }
  }

  // To the L2 cache, a line a lane, for the next layer.
  __device__ __forceinline__ void prefetch_keys(int of_layer) const {
    static_assert(2 * kWarpKeys == kWarpSize && kHead * 2 == 128);
    const int key = lane % kWarpKeys;
    if (of_layer >= s.layers || key >= keys.count()) return;
    for (int head = 0; head < heads.count(); ++head) {
      prefetch_to_l2(cached(lane >= kWarpKeys, of_layer, head) + key * kHead);
    }
  }

  __device__ __forceinline__ void attend(const OfKeys& of_heads) {
    const int count = keys.count();
    prefetch_keys(layer + 1);
    wait(&shared.qkv_full, layer, bytes_of_qkv(), Wanted::kQkv);
    record(Step::kQkv);
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      if (head >= heads.count()) continue;
      const Cached& of = of_heads[head];
      float score[kRounds] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const from = shared.qkv[head] + half * (kHead / 2) + t * 8;
        const Vector<float, 4> q[2] = {load_vector<4>(from), load_vector<4>(from + 4)};
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
          if (r * 8 >= count) continue;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const uint32_t pair = of.k[r][half].element[i];
            score[r] += q[i / 2].element[i % 2 * 2] * low_of<T>(pair);
            score[r] += q[i / 2].element[i % 2 * 2 + 1] * high_of<T>(pair);
          }
        }
      }
      float max = -INFINITY;
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        score[r] += __shfl_xor_sync(kFullWarp, score[r], 1);
        score[r] += __shfl_xor_sync(kFullWarp, score[r], 2);
        if (r * 8 + g >= count) score[r] = -INFINITY;
        max = fmaxf(max, score[r]);
      }
#pragma unroll
      for (int apart = 4; apart < kWarpSize; apart *= 2) max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, apart));
      const float base = max == -INFINITY ? 0.0f : max;
      float sum = 0, out[2] = {};
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        if (r * 8 >= count) continue;
        const float weight = exp2_approx(score[r] - base);
        sum += weight;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float of_key = __shfl_sync(kFullWarp, weight, i * 4);
          out[0] += of_key * low_of<T>(of.v[r * 8 + i]);
          out[1] += of_key * high_of<T>(of.v[r * 8 + i]);
        }
      }
#pragma unroll
      for (int apart = 4; apart < kWarpSize; apart *= 2) sum += __shfl_xor_sync(kFullWarp, sum, apart);
      shared.of_warps[head][at.warp][lane] = {out[0], out[1]};
      if (lane == 0) shared.of_warps[head][at.warp][kHead / 2] = {max, sum};
    }
    named_barrier_sync(kComputingOnly, kComputing);
    // All warps put the block's parts together; each sends them to one block.
    static_assert(kClusterWarps == kClusterBlocks);
    const uint32_t to = remote_address(&shared, at.warp), barrier = there(to, &shared.attended_full);
#pragma unroll 1
    for (int head = 0; head < heads.count(); ++head) {
      const Attended of_block = together(shared.of_warps[head], {-INFINITY, 0, {0, 0}});
      float2* const part = shared.attended[head][at.block];
      store_remote_async(there(to, part + lane), Pair<float>{of_block.out.x, of_block.out.y}, barrier);
      if (lane > 0) continue;
      store_remote_async(there(to, part + kHead / 2), Pair<float>{of_block.max, of_block.sum}, barrier);
    }
  }
  // Two columns of attention's output over some keys, not divided by the sum of weights yet.
  struct Attended {
    float max, sum;
    float2 out;
  };
  template <int N>
  __device__ __forceinline__ Attended together(const typename Shared::Part (&parts)[N], const Attended& more) const {
    float max = more.max;
#pragma unroll
    for (const auto& part : parts) max = fmaxf(max, part[kHead / 2].x);
    const float base = max == -INFINITY ? 0.0f : max, of_more = exp2_approx(more.max - base);
    Attended all{max, of_more * more.sum, {of_more * more.out.x, of_more * more.out.y}};
#pragma unroll
    for (const auto& part : parts) {
      const float2 peak = part[kHead / 2], out = part[lane];
      const float factor = exp2_approx(peak.x - base);
      all.sum += factor * peak.y;
      all.out = {all.out.x + factor * out.x, all.out.y + factor * out.y};
    }
    return all;
  }

  using OfHeads = Vector16[kHeads][kGroups];
  __device__ __forceinline__ void take_of_heads(OfHeads& w) {
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      take(head < heads.count() ? granules : 0, w[head]);
    }
  }
  __device__ __forceinline__ void project(const OfHeads& w) {
    Attended newest[kHeads];
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      if (head >= heads.count()) continue;
      const float *const q = shared.qkv[head], *const k = q + kHead, *const v = k + kHead;
      const float score = warp_sum(q[lane] * k[lane] + q[lane + kWarpSize] * k[lane + kWarpSize]);
      newest[head] = {score, 1, {v[2 * lane], v[2 * lane + 1]}};
    }
    wait(&shared.attended_full, layer, bytes_of_attended(), Wanted::kAttended);
    record(Step::kAttended);
    float sum[kGroups][4] = {};
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      if (head >= heads.count()) continue;
      const Attended all = together(shared.attended[head], newest[head]);
      const float inverse = reciprocal_approx(all.sum);
      const TwoParts mine = two_parts<T>(all.out.x * inverse, all.out.y * inverse);
      Operand x;
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // a granule's values are in two lanes
        const int lane_of = 2 * (g / 2 * 4 + t) + i;
        const uint32_t high = __shfl_sync(kFullWarp, mine.high, lane_of),
                       low = __shfl_sync(kFullWarp, mine.low, lane_of);
        x.element[i] = g % 2 == 0 ? high : low;
      }
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        if (i < granules) multiply(sum[i], w[head][i], x);
      }
    }
    publish<kAttention>(sum);
  }

  // ---- the MLP ----

  // Weights of the first groups, which come to registers before the hidden layer does.
  static constexpr int kBefore = kGroups < 4 ? kGroups : 2;
  using OfSecond = Vector16[kBefore][kMostUnits];
  __device__ __forceinline__ void take_of_second(OfSecond& w) {
#pragma unroll
    for (Vector16(&of_group)[kMostUnits] : w) take(units, of_group);
  }
  __device__ __forceinline__ void second(const OfSecond& before) {
    Vector16 w[kMostUnits];
    wait(&shared.hidden_full, layer, bytes_of_hidden(), Wanted::kHidden);
    record(Step::kHidden);
    Operand x[kMostUnits];
#pragma unroll
    for (int unit = 0; unit < kMostUnits; ++unit) {
      x[unit] = unit < units ? operand(shared.hidden, unit) : Operand{};
    }
    float sum[kGroups][4] = {};
#pragma unroll
    for (int unit = 0; unit < kMostUnits; ++unit) {
      if (unit >= units) continue;
#pragma unroll
      for (int i = 0; i < kBefore; ++i) multiply(sum[i], before[i][unit], x[unit]);
    }
#pragma unroll
    for (int i = kBefore; i < kGroups; ++i) {
      if (i >= granules) continue;
      take(units, w);
      float odd[4] = {};
#pragma unroll
      for (int unit = 0; unit < kMostUnits; ++unit) {
        if (unit < units) multiply(unit % 2 == 0 ? sum[i] : odd, w[unit], x[unit]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[i][j] += odd[j];
    }
    publish<kMlp>(sum);
  }
};

}  // namespace kf::KF_BACKEND::decode_step
