// What a warp of v4_clusters has and does: its stream of weights, products, x and what it sends, attention, the MLP.
#pragma once

#include <step1/approximate.h>
#include <step1/gelu.h>
#include <step2/cluster.h>
#include <step2/dependent_launch.h>
#include <step2/mma.h>

#include "cluster_pack.h"
#include "rungs.h"
#include "token_block.h"

namespace kf::KF_BACKEND::decode_step {

constexpr int kClusterThreads = kClusterWarps * kWarpSize;
enum Half { kAttention, kMlp };  // of a layer: what is added to x

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
  static constexpr int kSlotBytes = piece_of(kSteps) * kStepBytes;
  static constexpr int kRingSlots = (kSteps <= 16 ? 24 : 23) * 1024 / kSlotBytes;
  using Part = float2[kHead / 2 + 1];  // of attention: sums of values, then maximum and sum of weights

  unsigned char ring[kClusterWarps][kRingSlots][kSlotBytes];
  unsigned char constants[kClusterWarps][2][Shares::kConstantBytes];
  unsigned char pieces[kClusterWarps][Shares::kMostPieces];  // how many steps each piece of a layer has
  // Operand b, a granule in 16 bytes: the upper parts of its four values, then the lower ones.
  unsigned char x[2][kSteps * 16 * 16];
  unsigned char hidden[most_units(kSteps) * 16 * 16];
  float qkv[kMostHeads][3 * kHead];
  float2 moments[2][kOfCluster];  // of each warp's columns: mean, Σ (x − mean)²
  Part attended[kMostHeads][kClusterBlocks], of_warps[kMostHeads][kClusterWarps];
  float sums[kClusterWarps];
  uint64_t full[kClusterWarps][kRingSlots], constants_full[kClusterWarps];
  uint64_t x_full[2], moments_full[2], qkv_full, attended_full, hidden_full;
};

// kTrace: it records when it is where.
template <class T, int kSteps, bool kTrace>
struct ClusterWarp {
  using Shared = ClusterShared<kSteps>;
  using Operand = Vector<uint32_t, 2>;  // b, a step's
  static constexpr int kPiece = piece_of(kSteps), kGroups = most_granules(kSteps), kSets = up(kGroups, kOfMessage);
  static constexpr int kMostUnits = most_units(kSteps);
  // Whether a tile's weights come to registers before x does. Of wide models there is no room, and memory is the limit.
  static constexpr bool kAhead = kSteps == 12;

  const ClusterToken& token;
  const Args& a;
  const Shares& s;
  Shared& shared;
  State* const state;
  Message* const messages;
  const Place place;
  const uint32_t tag;  // of layer 0
  const int lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
  const WarpPlace at;
  const Range heads, keys;    // of the cluster; before the new one
  const int units, granules;  // of the cluster's hidden layer; of the warp's columns of x
  const int first_granule;
  const int qkv_tiles, fc_tiles;
  const uint32_t peer;       // a lane's block of the cluster, where it sends to: its shared memory
  const int row;             // of each group, of which a lane has x. Eight lanes have the same, for a block each
  const float2 columns_of;   // how many columns of x the warps of moments `lane` and `lane + 32` have
  const float columns_here;  // and this one
  uint32_t real = 0;         // bit i: whether the lane's column of group i is one of x
  uint32_t with_heads = 0;   // bit i: whether cluster `lane % 8 + 8·i` sends a part of attention
  float residual[kGroups] = {};
  bool broken = false;  // it waited in vain: what it gives is NaN
  int layer = 0;        // in which it is
  // The stream: what comes next, and into which slot.
  const unsigned char* from;
  int pieces, next_piece = 0, layers_left, left, slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ ClusterWarp(const ClusterToken& token, Shared& shared, const Place& place, uint32_t epoch,
                                         const WarpPlace& at)
      : token(token),
        a(token.a),
        s(token.s),
        shared(shared),
        state(reinterpret_cast<State*>(token.packed)),
        messages(reinterpret_cast<Message*>(token.packed)),
        place(place),
        tag(epoch * static_cast<uint32_t>(token.s.layers) + 1),
        at(at),
        heads(token.s.heads_of(at.cluster)),
        keys(Shares::keys(warp_uniform(place.before()), at.index())),
        units(token.s.units_of(at.cluster).count()),
        granules(granules_of(kSteps, at.index()).count()),
        first_granule(granules_of(kSteps, at.index()).first),
        qkv_tiles(token.s.tiles(at, Kind::kQkv)),
        fc_tiles(token.s.tiles(at, Kind::kFc)),
        peer(remote_address(&shared, lane % kClusterBlocks)),
        row(lane / kClusterBlocks),
        columns_of{columns(token.s, lane), columns(token.s, lane + kWarpSize)},
        columns_here(columns(token.s, at.index())),
        from(token.packed + token.s.stream_at(at)),
        layers_left(token.s.layers) {
    const unsigned char* const table = token.packed + s.constants_of(at, -1);
    shared.pieces[at.warp][lane] = table[lane];
    shared.pieces[at.warp][lane + kWarpSize] = table[lane + kWarpSize];
    __syncwarp();
    pieces = table[Shares::kPiecesAt];
    for (int i = 0; i < kGroups; ++i) real |= static_cast<uint32_t>(column_of_x(i) >= 0) << i;
    for (int i = 0; i < 2; ++i) {
      const int cluster = lane % kClusterBlocks + i * kClusterBlocks;
      with_heads |= static_cast<uint32_t>(cluster < s.clusters && s.heads_of(cluster).count() > 0) << i;
    }
    left = s.layers * pieces + s.logit_tiles(at).count() * (kSteps / kPiece);
  }
  __device__ __forceinline__ static float columns(const Shares& s, int index) {
    const Range own = granules_of(kSteps, index);
    return static_cast<float>(max(0, min(own.count() * kGranule, s.width - own.first * kGranule)));
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
  static constexpr int kBytesOfX = kSteps * 16 * 16, kBytesOfMoments = kOfCluster * 8;
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
    for (int half = 0; half < 2; ++half) {
      expect(&shared.x_full[half], kBytesOfX);
      expect(&shared.moments_full[half], kBytesOfMoments);
    }
    expect(&shared.qkv_full, bytes_of_qkv());
    expect(&shared.attended_full, bytes_of_attended());
    expect(&shared.hidden_full, bytes_of_hidden());
  }
  __device__ __forceinline__ void wait(uint64_t* barrier, int phase, int bytes, Wanted wanted) {
    if (wait_for_phase<true, true>(barrier, phase & 1, state, wanted, phase)) {
      expect(barrier, bytes);
    } else {
      broken = true;
    }
  }
  __device__ __forceinline__ void wait_for_x(int half, int phase) {
    wait(&shared.x_full[half], phase, kBytesOfX, Wanted::kX);
  }
  // By who does not read this phase's x.
  __device__ __forceinline__ void only_announce(int half) {
    if (at.warp > 0) return;
    wait_for_x(half, layer);
    wait(&shared.moments_full[half], layer, kBytesOfMoments, Wanted::kX);
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
    const TwoParts one = two_parts<T>(a, b), two = two_parts<T>(c, d);
    send({one.high, two.high, one.low, two.low}, to, barrier);
  }

  // ---- the stream of weights ----

  // The first lane's: the others' count is not looked at.
  __device__ __forceinline__ void bring(int to) {
    if (lane > 0 || left == 0) return;
    --left;
    int steps = kPiece;
    if (layers_left > 0) {
      steps = shared.pieces[at.warp][next_piece];
      if (++next_piece == pieces) {
        next_piece = 0;
        --layers_left;
      }
    }
    const int bytes = steps * kStepBytes;
    uint64_t* const barrier = &shared.full[at.warp][to];
    mbarrier_arrive_expect_tx(barrier, bytes);
    bulk_load(shared.ring[at.warp][to], from, bytes, barrier);
    from += bytes;
  }
  // A lane's first vector of the piece that is next.
  __device__ __forceinline__ const unsigned char* begin_piece() {
    broken |= !wait_for_phase<true>(&shared.full[at.warp][slot], parity, state, Wanted::kOfLayer, layer);
    return shared.ring[at.warp][slot] + lane * 16;
  }
  __device__ __forceinline__ void end_piece() {
    __syncwarp();
    bring(slot);
    if (++slot == Shared::kRingSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
  using Weights = Vector16[kAhead ? kSteps : kPiece];
  __device__ __forceinline__ void take_ahead(Weights& w) {
    if constexpr (kAhead) take(kSteps, w);
  }
  // So many steps, of at most N.
  template <int N>
  __device__ __forceinline__ void take(int steps, Vector16 (&w)[N]) {
#pragma unroll
    for (int first = 0; first < N; first += kPiece) {
      if (first >= steps) continue;
      const unsigned char* const piece = begin_piece();
#pragma unroll
      for (int i = first; i < N && i < first + kPiece; ++i) {
        if (i < steps) w[i] = load_16(piece + (i - first) * kStepBytes);
      }
      end_piece();
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
    broken |= !wait_for_phase<true>(&shared.constants_full[at.warp], layer & 1, state, Wanted::kOfLayer, layer);
    bring_constants(layer + 1);
  }
  __device__ __forceinline__ void begin_stream() {
    for (int i = 0; i < Shared::kRingSlots; ++i) bring(i);
    bring_constants(0);
    prefetch_keys(0);
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
  // Of tile k, of which the first is there already if kAhead.
  __device__ __forceinline__ void product(int k, Weights& w, const unsigned char* x, float (&sum)[4][4]) {
    if constexpr (kAhead) {
      if (k > 0) take_ahead(w);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) multiply(sum[step % 4], w[step], operand(x, step));
    } else {
#pragma unroll 1
      for (int first = 0; first < kSteps; first += kPiece) {
        take(kPiece, w);
#pragma unroll
        for (int i = 0; i < kPiece; ++i) multiply(sum[i % 4], w[i], operand(x, first + i));
      }
    }
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
  // A layer's part of x: a row of three groups is a message.
  __device__ __forceinline__ void publish(int half, const float (&sum)[kGroups][4]) const {
    float value[kSets * kOfMessage] = {};
#pragma unroll
    for (int i = 0; i < kGroups; ++i) value[i] = broken ? NAN : row_of(sum[i]);
    if (lane >= 16 || t != 0) return;
    Message* const to = messages + s.part_at(half, layer, at.cluster, at.index()) + g;
#pragma unroll
    for (int i = 0; i < kSets; ++i) {
      store_message(to + 4 * i, __float_as_uint(value[3 * i]), __float_as_uint(value[3 * i + 1]),
                    __float_as_uint(value[3 * i + 2]), tag + layer);
    }
  }

  // ---- x ----

  __device__ __forceinline__ float over_rows(float sum) const {
    sum += __shfl_xor_sync(kFullWarp, sum, kClusterBlocks);
    return sum + __shfl_xor_sync(kFullWarp, sum, 2 * kClusterBlocks);
  }
  __device__ __forceinline__ void send_first_x() {
    send_x(kMlp, token.packed + s.constants_of(at, -1), Shares::kNextGain);
  }
  __device__ __forceinline__ void send_x(int half, Shares::OfX which) {
    send_x(half, shared.constants[at.warp][layer & 1], which);
  }
  // A warp's columns to all blocks of the cluster: times the next LayerNorm's gain, as operand b, and their moments.
  __device__ __forceinline__ void send_x(int half, const unsigned char* constants, Shares::OfX which) {
    float gain[kGroups];
    of_x(constants, which, gain);
    constexpr int kBase = kGroups / 4 * 4;
    unsigned char* const to = shared.x[half] + first_granule * 16;
    uint64_t* const barrier = &shared.x_full[half];
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
    float sum = 0, squares = 0;
#pragma unroll
    for (const float x : residual) sum += x;
    const float mean = columns_here > 0 ? over_rows(sum) / columns_here : 0.0f;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      if (real >> i & 1) squares += (residual[i] - mean) * (residual[i] - mean);
    }
    squares = over_rows(squares);
    if (row > 0) return;
    store_remote_async(there(peer, &shared.moments[half][at.index()]), Pair<float>{mean, squares},
                       there(peer, &shared.moments_full[half]));
  }
  // Mean and factor of all of x.
  __device__ __forceinline__ float2 mean_and_factor(int half, int phase) {
    wait(&shared.moments_full[half], phase, kBytesOfMoments, Wanted::kX);
    const float2 one = shared.moments[half][lane], two = shared.moments[half][lane + kWarpSize];
    const float inverse = 1.0f / static_cast<float>(s.width);
    const float mean = warp_sum(columns_of.x * one.x + columns_of.y * two.x) * inverse;
    const float apart_1 = one.x - mean, apart_2 = two.x - mean;
    const float squares =
        warp_sum((one.y + columns_of.x * apart_1 * apart_1) + (two.y + columns_of.y * apart_2 * apart_2));
    return {mean, rsqrtf(squares * inverse + token.eps)};
  }
  // The clusters' parts of half a layer, added to x: of a message lanes have two clusters each.
  __device__ __forceinline__ void add_parts(int half, Shares::OfX bias) {
    const int first = lane % kClusterBlocks;
    const Message* from[2 * kSets];
    bool needed[2 * kSets];
    Message got[2 * kSets];
#pragma unroll
    for (int i = 0; i < 2 * kSets; ++i) {
      const int cluster = first + i % 2 * kClusterBlocks;
      from[i] = messages + s.part_at(half, layer, cluster, at.index()) + i / 2 * 4 + row;
      needed[i] = half == kMlp ? cluster < s.clusters : with_heads >> i % 2 & 1;
    }
    wait_for(from, needed, got, tag + layer, state, Wanted::kX, layer);
    float of_bias[kGroups];
    of_x(shared.constants[at.warp][layer & 1], bias, of_bias);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int set = i / kOfMessage * 2, value = i % kOfMessage;
      float sum = __uint_as_float(got[set].value[value]) + __uint_as_float(got[set + 1].value[value]);
#pragma unroll
      for (int apart = 1; apart < kClusterBlocks; apart *= 2) sum += __shfl_xor_sync(kFullWarp, sum, apart);
      residual[i] += broken ? NAN : sum + of_bias[i];
    }
  }
  // x begins with a mean of 0: LayerNorm, which is all that reads it, does not change, and its sums lose no digits.
  __device__ __forceinline__ void embed() {
    const Tokens<T> tokens(a, 0);
    float sum = 0;
    for (int column = threadIdx.x; column < s.width; column += kClusterThreads) sum += tokens.at(column);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int column = column_of_x(i);
      if (column >= 0) residual[i] = tokens.at(column);
    }
    sum = warp_sum(sum);
    if (lane == 0) shared.sums[at.warp] = sum;
    __syncthreads();
    float mean = 0;
#pragma unroll
    for (const float each : shared.sums) mean += each;
    mean /= static_cast<float>(s.width);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      if (real >> i & 1) residual[i] -= mean;
    }
  }

  // ---- attention ----

  __device__ __forceinline__ void queries_keys_values() {
    if (qkv_tiles == 0) return only_announce(kMlp);
    Weights w;
    take_ahead(w);
    wait_for_x(kMlp, layer);
    record(Step::kX);
    const float scale = token.scale_log2 / (a.scale_by_layer ? static_cast<float>(layer + 1) : 1.0f);
    float2 norm = {};
#pragma unroll 1
    for (int k = 0; k < qkv_tiles; ++k) {
      float sum[4][4] = {};
      product(k, w, shared.x[kMlp], sum);
      if (k == 0) norm = mean_and_factor(kMlp, layer);
      float y = normed_row(sum, norm, of_row(k));
      const int first = Shares::tile(at, Kind::kQkv, k) * kGranule, head = first / (3 * kHead),
                in_head = first % (3 * kHead);
      const int which = in_head / kHead;  // q, k or v: the same of a tile's rows
      const T rounded = from_compute<T>(y);
      y = which == 0 ? scale * y : to_compute(rounded);
      float of_tile[kGranule];
      four_rows(broken ? NAN : y, of_tile);
      if (row == 0) {
        send({__float_as_uint(of_tile[0]), __float_as_uint(of_tile[1]), __float_as_uint(of_tile[2]),
              __float_as_uint(of_tile[3])},
             &shared.qkv[head][in_head], &shared.qkv_full);
      }
      if (which > 0 && place.slot >= 0 && lane < 16 && t == 0) {
        T* const to = in_cache<T>(which == 1 ? a.k_cache : a.v_cache, which == 1 ? a.k_stride : a.v_stride, layer, 0,
                                  heads.first + head, place.slot);
        to[in_head % kHead + g] = rounded;  // read by later launches only
      }
    }
  }

  // Keys of a head: four lanes have one, each a quarter of its columns. Values: a lane has two columns of each.
  static constexpr int kRounds = kWarpKeys / 8;
  struct Cached {
    Vector16 k[kRounds][2];
    uint32_t v[kWarpKeys];
  };
  __device__ __forceinline__ const T* cached(bool values, int of_layer, int head) const {
    return in_cache<const T>(values ? a.v_cache : a.k_cache, values ? a.v_stride : a.k_stride, of_layer, 0,
                             heads.first + head, place.begin + keys.first);
  }
  __device__ __forceinline__ void load_keys(int head, Cached& of) const {
    const int count = keys.count();
    if (count == 0) return;
    const T *const k = cached(false, layer, head), *const v = cached(true, layer, head);
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      if (r * 8 >= count) continue;
      const T* const key = k + min(r * 8 + g, count - 1) * kHead + t * 8;
      of.k[r][0] = load_vector<4>(reinterpret_cast<const uint32_t*>(key));
      of.k[r][1] = load_vector<4>(reinterpret_cast<const uint32_t*>(key + kHead / 2));
#pragma unroll
      for (int i = r * 8; i < r * 8 + 8; ++i) {
        of.v[i] = *reinterpret_cast<const uint32_t*>(v + min(i, count - 1) * kHead + 2 * lane);
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

  __device__ __forceinline__ void attend() {
    const int count = keys.count();
    Cached of = {};
    load_keys(0, of);
    prefetch_keys(layer + 1);
    wait(&shared.qkv_full, layer, bytes_of_qkv(), Wanted::kQkv);
    record(Step::kQkv);
#pragma unroll 1
    for (int head = 0; head < heads.count(); ++head) {
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
      if (head + 1 < heads.count()) load_keys(head + 1, of);
#pragma unroll
      for (int apart = 4; apart < kWarpSize; apart *= 2) sum += __shfl_xor_sync(kFullWarp, sum, apart);
      shared.of_warps[head][at.warp][lane] = {out[0], out[1]};
      if (lane == 0) shared.of_warps[head][at.warp][kHead / 2] = {max, sum};
    }
    __syncthreads();
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

  __device__ __forceinline__ void project() {
    Vector16 w[kMostHeads][kGroups];
    Attended newest[kMostHeads];
#pragma unroll
    for (int head = 0; head < kMostHeads; ++head) {
      if (head >= heads.count()) continue;
      take(granules, w[head]);
      const float *const q = shared.qkv[head], *const k = q + kHead, *const v = k + kHead;
      const float score = warp_sum(q[lane] * k[lane] + q[lane + kWarpSize] * k[lane + kWarpSize]);
      newest[head] = {score, 1, {v[2 * lane], v[2 * lane + 1]}};
    }
    wait(&shared.attended_full, layer, bytes_of_attended(), Wanted::kAttended);
    record(Step::kAttended);
    float sum[kGroups][4] = {};
#pragma unroll
    for (int head = 0; head < kMostHeads; ++head) {
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
    publish(kAttention, sum);
  }

  // ---- the MLP ----

  __device__ __forceinline__ void hidden(Weights& w) {
    if (fc_tiles == 0) return only_announce(kAttention);
    wait_for_x(kAttention, layer);
    record(Step::kMiddleX);
    float2 norm = {};
#pragma unroll 1
    for (int k = 0; k < fc_tiles; ++k) {
      float sum[4][4] = {};
      product(k, w, shared.x[kAttention], sum);
      if (k == 0) norm = mean_and_factor(kAttention, layer);
      float y = normed_row(sum, norm, of_row(kMostTiles + k));
      y = a.tanh ? fast_gelu<T, true>(y) : fast_gelu<T, false>(y);
      float of_tile[kGranule];
      four_rows(broken ? NAN : y, of_tile);
      if (row == 0) {
        send_granule(of_tile[0], of_tile[1], of_tile[2], of_tile[3],
                     shared.hidden + Shares::tile(at, Kind::kFc, k) * 16, &shared.hidden_full);
      }
    }
  }
  // Weights of the first groups come to registers before the hidden layer does.
  __device__ __forceinline__ void second() {
    constexpr int kBefore = kGroups < 4 ? kGroups : 1;
    Vector16 before[kBefore][kMostUnits], w[kMostUnits];
#pragma unroll
    for (int i = 0; i < kBefore; ++i) take(units, before[i]);
    wait(&shared.hidden_full, layer, bytes_of_hidden(), Wanted::kHidden);
    record(Step::kHidden);
    Operand x[kMostUnits];
#pragma unroll
    for (int unit = 0; unit < kMostUnits; ++unit) {
      if (unit < units) x[unit] = operand(shared.hidden, unit);
    }
    float sum[kGroups][4] = {};
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      if (i >= granules) continue;
      if (i >= kBefore) take(units, w);
#pragma unroll
      for (int unit = 0; unit < kMostUnits; ++unit) {
        if (unit < units) multiply(sum[i], i < kBefore ? before[i < kBefore ? i : 0][unit] : w[unit], x[unit]);
      }
    }
    publish(kMlp, sum);
  }
};

}  // namespace kf::KF_BACKEND::decode_step
