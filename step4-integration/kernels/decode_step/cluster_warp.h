// What a computing warp of v4_clusters does: exchanges, its stream of weights, products, x and what is added to it,
// attention, the MLP, logits.
#pragma once

#include <step1/approximate.h>
#include <step1/gelu.h>
#include <step2/dependent_launch.h>
#include <step2/mma.h>

#include "cluster_block.h"

namespace kf::KF_BACKEND::decode_step {

// kBatch: for so many rows, or fewer; each row's numbers are those of a launch for it alone. kTrace: it records when it
// is where.
template <class T, int kSteps, int kBatch, bool kTrace>
struct ClusterWarp {
  using Shared = ClusterShared<kSteps, kBatch>;
  using Operand = Vector<uint32_t, 2>;  // b, a step's
  static constexpr int kGroups = most_granules(kSteps);
  static constexpr int kMostUnits = most_units(kSteps), kHeads = most_heads(kSteps);
  static constexpr bool kEven = kSteps * 16 % kOfCluster == 0;  // all warps have as many granules
  static constexpr bool kNarrow = narrow(kSteps);
  // A tile is four numbers to a row of the batch, in 4 of 32 lanes. So four rows share what follows a product: of quad
  // q lane t of four has row 4·q + t.
  static constexpr int kTogether = kBatch < 4 ? kBatch : 4, kQuads = up(kBatch, 4);

  const ClusterToken& token;
  const Args& a;
  const Shares& s;
  Shared& shared;
  State* const state;
  const Place place;     // of the first row
  const uint32_t epoch;  // launches before
  const int set;         // of sums, in this one
  const int lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
  const WarpPlace at;
  const Range heads, keys;    // of the cluster; of the first row, before the new one
  const int units, granules;  // of the cluster's hidden layer; of the warp's columns of x
  const int first_granule;
  const int qkv_tiles, fc_tiles;
  const uint32_t peer;       // a lane's block of the cluster, where it sends to: its shared memory
  const int row;             // of each group, of which a lane has x. Eight lanes have the same, for a block each. Where
                             // a quad's rows are sent, the one of them
  const float inverse_here;  // of how many this one has, or 0
  uint32_t real = 0;         // bit i: whether the lane's column of group i is one of x
  float residual[kBatch][kGroups] = {};
  bool broken = false;              // it waited in vain: what it gives is NaN
  int layer = 0;                    // in which it is
  float units_of_one[kQuads] = {};  // of sums, in this half of the layer, of a lane's row
  Walk used;                        // of the ring

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
  __device__ __forceinline__ int batch() const { return rows_of<kBatch>(a); }
  __device__ __forceinline__ Place place_of(int b) const { return kBatch == 1 ? place : shared.places[b]; }
  // Of a head, before the new one.
  __device__ __forceinline__ Range keys_of(int b) const {
    return kBatch == 1 ? keys : Shares::keys(shared.places[b].before(), at.index());
  }
  // f(b, row) for each row: b a constant, for registers, and the row itself; behind each quad then(q). A quad's rows go
  // beside each other; where there are fewer the last one comes again.
  template <class F, class Then>
  __device__ __forceinline__ void each_row(F&& f, Then&& then) const {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      if (4 * q >= batch()) continue;
#pragma unroll
      for (int b = 4 * q; b < 4 * q + kTogether; ++b) f(b, kBatch == 1 ? 0 : min(b, batch() - 1));
      then(q);
    }
  }
  template <class F>
  __device__ __forceinline__ void each_row(F&& f) const {
    each_row(f, [](int) {});
  }
  // Whether the lane has a number of row 4·q + t of the batch, that of the tile's row g % 4; and that row, or the last.
  __device__ __forceinline__ bool has_row(int q) const { return t % 2 == g / kGranule && 4 * q + t < batch(); }
  __device__ __forceinline__ int own_row(int q) const { return kBatch == 1 ? 0 : min(4 * q + t, batch() - 1); }
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
  __device__ __forceinline__ int bytes_of_x() const { return batch() * kSteps * 16 * 16; }
  __device__ __forceinline__ int bytes_of_qkv() const { return batch() * heads.count() * 3 * kHead * 4; }
  __device__ __forceinline__ int bytes_of_attended() const {
    return batch() * heads.count() * kClusterBlocks * static_cast<int>(sizeof(typename Shared::Part));
  }
  __device__ __forceinline__ int bytes_of_hidden() const { return batch() * units * 16 * 16; }
  __device__ __forceinline__ void expect(uint64_t* barrier, int bytes) const {
    if (at.warp == 0 && lane == 0) mbarrier_arrive_expect_tx(barrier, bytes);
  }
  __device__ __forceinline__ void expect_all() const {
#pragma unroll
    for (uint64_t& each : shared.x_full) expect(&each, bytes_of_x());
    expect(&shared.qkv_full, bytes_of_qkv());
    expect(&shared.attended_full, bytes_of_attended());
    expect(&shared.hidden_full, bytes_of_hidden());
  }
  __device__ __forceinline__ void wait(uint64_t* barrier, int phase, int bytes, Wanted wanted) {
    // Behind a phase that has not come the next one may look complete. It is waited for all the same: a branch around
    // each wait made a token of 124M take 107 µs on an H200, not 99.
    broken |= !wait_for_phase<true>(barrier, phase & 1, state, wanted, phase);
    if (!broken) expect(barrier, bytes);
  }
  __device__ __forceinline__ void wait_for_x(int half, int phase) {
    wait(&shared.x_full[half], phase, bytes_of_x(), Wanted::kX);
  }
  // A tile's four numbers, of the lane's row of the batch. They are where has_row says.
  __device__ __forceinline__ void four_numbers(float mine, float (&number)[kGranule]) const {
    const int first = kBatch == 1 ? 0 : row % 2 * 16 + row;
#pragma unroll
    for (int i = 0; i < kGranule; ++i) number[i] = __shfl_sync(kFullWarp, mine, 4 * i + first);
  }
  using Granule = Vector<uint32_t, 4>;  // of operand b: four values in two parts
  __device__ __forceinline__ static Granule granule(float a, float b, float c, float d) {
    const TwoParts one = two_parts<T>(a, b), two = two_parts<T>(c, d);
    return {{one.high, two.high, one.low, two.low}};
  }
  // After a wait in vain nothing is sent: nobody announces it, and a barrier counts no more than 2^20 bytes.
  __device__ __forceinline__ void send(const Granule& of, const void* to, uint64_t* barrier) const {
    if (!broken) store_remote_async(there(peer, to), of.element, there(peer, barrier));
  }

  // ---- the stream of weights ----

  // A place in the ring, once what was loaded from it has come: to arrive does not wait for loads on their way, and
  // what comes next can be sooner than they are. blockIdx.y is 0, which the compiler does not know.
  __device__ __forceinline__ void give_back(uint64_t* empty, uint32_t loaded) const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(empty + (loaded & blockIdx.y));
  }

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
        piece = shared.ring[at.warp] + used.next((kExact ? steps : kPiece) * kStepBytes, ring_bytes(kSteps, kBatch)) +
                lane * 16;
      }
#pragma unroll
      for (int i = first; i < first + kPiece; ++i) {
        w[i] = (kExact ? i < steps : any) ? load_16(piece + (i - first) * kStepBytes) : Vector16{};
      }
      if (!any) continue;
      uint32_t loaded = 0;
#pragma unroll
      for (int i = first; i < first + kPiece; ++i) loaded |= w[i].element[3];
      give_back(&shared.empty[at.warp][place], loaded);
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
  // Of a chunk of x and the tile's row g % 4, in lanes where t and g / 4 are both even, or both odd. Both parts lie in
  // a lane.
  __device__ __forceinline__ float of_chunk(const float (&sum)[4]) const {
    return t < 2 ? sum[0] + sum[1] : sum[2] + sum[3];
  }
  // The sum over chunks: of a quad's rows lane t gets row t's, in lanes as above.
  using Quad = float[kTogether];
  __device__ __forceinline__ float over_chunks(const Quad& own) const {
    if constexpr (kTogether == 1) {
      const float pair = own[0] + __shfl_xor_sync(kFullWarp, own[0], 2);  // chunks 0 and 2, or 1 and 3
      return pair + __shfl_xor_sync(kFullWarp, pair, 17);                 // four rows of the tile on
    } else {  // the same, but where two lanes have the same rows, each keeps half of them
      float pair[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float keep = kTogether == 2 || t < 2 ? own[i] : own[kTogether - 2 + i];
        const float give = kTogether == 4 && t < 2 ? own[2 + i] : own[i];
        pair[i] = keep + __shfl_xor_sync(kFullWarp, give, 2);
      }
      const bool odd = t % 2 != 0;
      return (odd ? pair[1] : pair[0]) + __shfl_xor_sync(kFullWarp, odd ? pair[0] : pair[1], 17);
    }
  }
  // A tile's numbers.
  __device__ __forceinline__ void product(const Weights& w, const unsigned char (&x)[kBatch][kSteps * 16 * 16],
                                          float (&of_quads)[kQuads]) const {
    Quad own;
    each_row(
        [&](int b, int of_row) {
          float sum[4][4] = {};
#pragma unroll
          for (int step = 0; step < kSteps; ++step) multiply(sum[step % 4], w[step], operand(x[of_row], step));
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[0][i] = (sum[0][i] + sum[1][i]) + (sum[2][i] + sum[3][i]);
          own[b % 4] = of_chunk(sum[0]);
        },
        [&](int q) { of_quads[q] = over_chunks(own); });
  }
  // The same behind a LayerNorm of this mean and factor; `of_row`: the tile's row's two numbers.
  __device__ __forceinline__ static float normed(float number, float2 norm, float2 of_row) {
    return norm.y * (number - norm.x * of_row.x) + of_row.y;
  }

  // ---- what clusters add to x ----

  // Sums of whole numbers, added up by the L2 cache: in whatever order clusters come, the result is the same. A unit is
  // between 2^-21 and 2^-20 of x's standard deviation, with LayerNorm's eps in it: finer than the two parts in which
  // products take x. The ten lowest bits count who has added, and who had no number; the others are what all added.
  static constexpr int kCountBits = 10, kUnitBits = 21;
  static constexpr unsigned long long kOne = 1, kNoNumber = 32;
  static constexpr float kMostUnitsOfPart = 0x1p49f;
  // Two to some power, for the factor of the LayerNorm in front.
  __device__ __forceinline__ static float units_for(float2 norm) {
    return __uint_as_float(__float_as_uint(norm.y) & 0x7f800000u) * static_cast<float>(1 << kUnitBits);
  }
  // Where the sum of a row of the batch lies: a warp's sums of a group stand together.
  static constexpr int kSums = kGroups * kBatch * kGranule;
  KF_BOTH static constexpr int sum_at(int group, int b) { return (group * kBatch + b) * kGranule; }
  __device__ __forceinline__ unsigned long long* sums(int of_set, int half) const {
    return reinterpret_cast<unsigned long long*>(token.packed + s.sums_at(of_set, layer, half, at.index()));
  }
  template <int kHalf>
  __device__ __forceinline__ void publish(const float (&sum)[kGroups][kQuads]) const {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      unsigned long long* const to = sums(set, kHalf) + g % kGranule;
      if (!has_row(q)) continue;
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        const float in_units = sum[i][q] * units_of_one[q];
        const bool number = fabsf(in_units) < kMostUnitsOfPart && !broken;
        const auto whole = static_cast<unsigned long long>(number ? __float2ll_rn(in_units) : 0);
        atomicAdd(to + sum_at(i, 4 * q + t), (whole << kCountBits) + (number ? kOne : kOne + kNoNumber));
      }
    }
  }
  // For the next launch, of whatever batch. A cluster does it for all.
  __device__ __forceinline__ void clear_sums() const {
    if (layer % s.clusters != at.cluster) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 2 * lane; i < most_batch(kSteps) * kGroups * kGranule; i += 2 * kWarpSize) {
        store_vector(sums(1 - set, half) + i, Vector<unsigned long long, 2>{{0, 0}});
      }
    }
  }

  // ---- x ----

  // A warp's columns to all blocks of the cluster: times the next LayerNorm's gain, as operand b, and their moments.
  __device__ __forceinline__ void send_x(int half, const float (&gain)[kGroups]) {
    Quad about, sum, squares;
    each_row(
        [&](int b, int) {
          // Of the moments: about one of the columns, so that no digits are lost however far they are from 0.
          about[b % 4] = __shfl_sync(kFullWarp, residual[b][0], 0);
          sum[b % 4] = squares[b % 4] = 0;
#pragma unroll
          for (int i = 0; i < kGroups; ++i) {
            const float apart = real >> i & 1 ? residual[b][i] - about[b % 4] : 0.0f;
            sum[b % 4] += apart;
            squares[b % 4] += apart * apart;
          }
        },
        [&](int q) {
          float from = about[0];
#pragma unroll
          for (int i = 1; i < kTogether; ++i) {
            const float of_row = about[i];  // a copy: what is chosen by address lies in local memory
            if (row % kTogether == i) from = of_row;
          }
          // Over the four rows of a group; lanes of row i get the quad's row i.
          const float all = of_own_row<kClusterBlocks>(sum, lane), squared = of_own_row<kClusterBlocks>(squares, lane);
          const int b = 4 * q + row;
          if (row < kTogether && b < batch() && !broken) {
            const Pair<float> moments{from + all * inverse_here, squared - all * all * inverse_here};
            store_remote_async(there(peer, &shared.moments[half][b][at.index()]), moments,
                               there(peer, &shared.moments_full[half]));
          }
        });
    each_row([&](int b, int) { send_x(half, b, residual[b], gain); });
  }
  __device__ __forceinline__ void send_x(int half, int b, const float (&residual)[kGroups],
                                         const float (&gain)[kGroups]) const {
    constexpr int kBase = kGroups / 4 * 4;
    unsigned char* const to = shared.x[half][b] + first_granule * 16;
    uint64_t* const barrier = &shared.x_full[half];
    const bool exists = b < batch();
    float y[kBase + 4] = {};
#pragma unroll
    for (int i = 0; i < kGroups; ++i) y[i] = residual[i] * gain[i];
#pragma unroll
    for (int i = 0; i < kBase; i += 4) {
      if (exists) send(granule(y[i], y[i + 1], y[i + 2], y[i + 3]), to + (i + row) * 16, barrier);
    }
    // See column_in_warp.
    const int left = granules - kBase;
    if (left == 1) {
      float of[kGranule];
#pragma unroll
      for (int i = 0; i < kGranule; ++i)
        of[i] = __shfl_sync(kFullWarp, y[kBase], i * kClusterBlocks + lane % kClusterBlocks);
      if (row == 0 && exists) send(granule(of[0], of[1], of[2], of[3]), to + kBase * 16, barrier);
    } else if (left == 2) {
      const float one = __shfl_down_sync(kFullWarp, y[kBase], 2 * kClusterBlocks);
      const float two = __shfl_down_sync(kFullWarp, y[kBase + 1], 2 * kClusterBlocks);
      if (row < 2 && exists) send(granule(y[kBase], y[kBase + 1], one, two), to + (kBase + row) * 16, barrier);
    } else if (left == 3) {
      const int which = lane % kClusterBlocks;
      const float last = __shfl_sync(kFullWarp, which == 0 ? y[kBase] : (which == 1 ? y[kBase + 1] : y[kBase + 2]),
                                     3 * kClusterBlocks + min(row, 2));
      if (row < 3 && exists)
        send(granule(y[kBase], y[kBase + 1], y[kBase + 2], last), to + (kBase + row) * 16, barrier);
    }
  }
  // Mean and factor of all of x, of a lane's rows; and what is added next is counted in units for them. A named barrier
  // is the sooner way to tell, but there all eight warps wait for each other: in a wide model that is for weights.
  __device__ __forceinline__ void wait_for_norm(int half, int phase, float2 (&norm)[kQuads]) {
    if constexpr (kNarrow) {
      named_barrier_sync(kNorm + half, kComputing + kWarpSize);
    } else {
      broken |= !wait_for_phase<true>(&shared.norm_full[half], phase & 1, state, Wanted::kX, phase);
    }
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      norm[q] = shared.norm[half][own_row(q)];
      units_of_one[q] = units_for(norm[q]);
    }
  }
  // Until all have added. A lane looks at some sums of one row; where there are no more, at one of the first group.
  static constexpr int kLooks = up(kSums, kWarpSize);
  __device__ __forceinline__ bool wait_for_sums(const unsigned long long* from, int senders,
                                                unsigned long long (&got)[kLooks]) const {
    const int b = lane / kGranule % kBatch;
    for (uint32_t polls = 1;; ++polls) {
      bool all = true;
#pragma unroll
      for (int i = 0; i < kLooks; ++i) {
        const int at = i * kWarpSize + lane;
        got[i] = load_sum(from + (at < kSums ? at : lane % (kBatch * kGranule)));
      }
#pragma unroll
      for (const unsigned long long& each : got) all = all && static_cast<int>(each % kNoNumber) == senders;
      if (__all_sync(kFullWarp, all || b >= batch())) return true;
      if (__builtin_expect(polls % kPollsBetweenLooks != 0, 1)) continue;
      if (__any_sync(kFullWarp, give_up(state, polls, Wanted::kX, layer))) return false;
    }
  }
  // The sums of half a layer, added to x.
  template <int kHalf>
  __device__ __forceinline__ void add_parts() {
    static_assert(kWarpSize / kGranule % kBatch == 0);  // all sums that a lane looks at are of one row
    float bias[kGroups], gain[kGroups];
    of_x(shared.constants[at.warp][layer & 1], kHalf == kMlp ? Shares::kSecondBias : Shares::kBias, bias);
    of_x(shared.constants[at.warp][layer & 1], kHalf == kMlp ? Shares::kNextGain : Shares::kGain, gain);
    float units = units_of_one[0];
    if (kBatch > 1) units = units_for(shared.norm[1 - kHalf][min(lane / kGranule % kBatch, batch() - 1)]);
    const float one = __uint_as_float((254u << 23) - __float_as_uint(units));  // its reciprocal: a power of two
    unsigned long long got[kLooks] = {};
    broken |= !wait_for_sums(sums(set, kHalf), s.senders(kHalf), got);
    record(kHalf == kMlp ? Step::kSecondParts : Step::kParts);
    float added[kLooks];
#pragma unroll
    for (int i = 0; i < kLooks; ++i) {
      const bool number = got[i] % (kOne << kCountBits) < kNoNumber && !broken;
      added[i] = number ? static_cast<float>(static_cast<long long>(got[i]) >> kCountBits) * one : NAN;
    }
    each_row([&](int b, int) {
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        const int from = sum_at(i, b);
        residual[b][i] += __shfl_sync(kFullWarp, added[from / kWarpSize], from % kWarpSize + row) + bias[i];
      }
    });
    send_x(kHalf, gain);
  }
  // x begins with a mean of 0: LayerNorm, which is all that reads it, does not change, and its sums lose no digits.
  // What it needs comes from memory at the same time, also while blocks of the cluster begin.
  __device__ __forceinline__ void send_first_x(int64_t first_id) {
    constexpr int kOfThread = up(kSteps * kStepDepth, kComputing);
    float gain[kGroups];
    of_x(token.packed + s.constants_of(at, -1), Shares::kNextGain, gain);
    const auto column_of = [](int i) { return i * kComputing + static_cast<int>(threadIdx.x); };
    int64_t id[kBatch];
    bool exists[kBatch];
    typename Tokens<T>::Parts all[kBatch][kOfThread] = {}, own[kBatch][kGroups] = {};
    each_row([&](int b, int of_batch) { id[b] = b == 0 ? first_id : __ldg(a.ids + of_batch); });
    each_row([&](int b, int of_batch) {
      const Tokens<T> tokens(a, place_of(of_batch), id[b]);
      exists[b] = tokens.exists();
      if (!exists[b]) return;
#pragma unroll
      for (int i = 0; i < kOfThread; ++i) all[b][i] = tokens.parts(min(column_of(i), s.width - 1));
#pragma unroll
      for (int i = 0; i < kGroups; ++i) own[b][i] = tokens.parts(max(column_of_x(i), 0));
    });
    named_barrier_arrive(kAskedForX, kComputing + bringing_warps(kSteps) * kWarpSize);
    prefetch_keys(0);
    each_row([&](int b, int) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kOfThread; ++i) {
        if (column_of(i) < s.width) sum += all[b][i].sum();
      }
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        if (real >> i & 1) residual[b][i] = exists[b] ? own[b][i].sum() : NAN;
      }
      sum = warp_sum(sum);
      if (lane == 0) shared.sums[b][at.warp] = sum;
    });
    named_barrier_sync(kComputingOnly, kComputing);
    each_row([&](int b, int) {
      float mean = 0;
#pragma unroll
      for (const float each : shared.sums[b]) mean += each;
      mean /= static_cast<float>(s.width);
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        if (real >> i & 1) residual[b][i] -= mean;
      }
    });
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
  // A row's head, of whose cache the warp has some keys. All of a cluster stand one behind the other; so many go beside
  // each other, and their keys come ahead.
  static constexpr int kAhead = kBatch * kHeads == 1 ? 1 : 2;
  static_assert(kAhead % kHeads == 0);
  using OfKeys = Cached[kAhead];
  struct Query {
    int b, head, keys;
    bool exists;
  };
  __device__ __forceinline__ Query query(int i) const {
    const int b = min(i / kHeads, batch() - 1), head = i % kHeads;
    const bool exists = i / kHeads == b && head < heads.count();
    return {b, head, exists ? keys_of(b).count() : 0, exists};
  }
  __device__ __forceinline__ const T* cached(bool values, int of_layer, int b, int head) const {
    return in_cache<const T>(values ? a.v_cache : a.k_cache, values ? a.v_stride : a.k_stride, of_layer, b,
                             heads.first + head, place_of(b).begin + keys_of(b).first);
  }
  __device__ __forceinline__ void load_keys(const Query& of, Vector16 (&k)[kRounds][2]) const {
    const T* const from = cached(false, layer, of.b, of.head);
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      if (r * 8 >= of.keys) {
        k[r][0] = k[r][1] = {};
        continue;
      }
      const T* const key = from + min(r * 8 + g, of.keys - 1) * kHead + t * 8;
      k[r][0] = load_vector<4>(reinterpret_cast<const uint32_t*>(key));
      k[r][1] = load_vector<4>(reinterpret_cast<const uint32_t*>(key + kHead / 2));
    }
  }
  __device__ __forceinline__ void load_values(const Query& of, uint32_t (&v)[kWarpKeys]) const {
    const T* const from = cached(true, layer, of.b, of.head) + 2 * lane;
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      if (r * 8 >= of.keys) {
#pragma unroll
        for (int i = r * 8; i < r * 8 + 8; ++i) v[i] = 0;
        continue;
      }
#pragma unroll
      for (int i = r * 8; i < r * 8 + 8; ++i) {
        v[i] = *reinterpret_cast<const uint32_t*>(from + min(i, of.keys - 1) * kHead);
      }
    }
  }
  __device__ __forceinline__ void load_first(OfKeys& of) const {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      load_keys(query(i), of[i].k);
      load_values(query(i), of[i].v);
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
      float2 norm[kQuads];
      return wait_for_norm(of_x, layer, norm);
    }
    const float scale = token.scale_log2 / (a.scale_by_layer ? static_cast<float>(layer + 1) : 1.0f);
    constexpr int kStride = mlp ? sizeof(shared.hidden[0]) : sizeof(shared.qkv[0]);
    unsigned char* const to = mlp ? shared.hidden[0] : reinterpret_cast<unsigned char*>(shared.qkv);
    uint64_t* const barrier = mlp ? &shared.hidden_full : &shared.qkv_full;
    wait_for_x(of_x, layer);
    record(mlp ? Step::kMiddleX : Step::kX);
    float2 norm[kQuads] = {};
#pragma unroll 1
    for (int k = 0; k < tiles; ++k) {
      const float2 numbers = of_row(kHalf * kMostTiles + k);
      if (k > 0) take<kSteps>(kSteps, w);
      float sum[kQuads] = {};
      product(w, shared.x[of_x], sum);
      if (k == 0) wait_for_norm(of_x, layer, norm);
      const int tile = Shares::tile(at, mlp ? Kind::kFc : Kind::kQkv, k);
      const int in_head = tile * kGranule % (3 * kHead), which = in_head / kHead;  // q, k or v: the same of its rows
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        if (4 * q >= batch()) continue;
        float y = normed(sum[q], norm[q], numbers);
        const T rounded = from_compute<T>(y);
        if constexpr (mlp) {
          y = a.tanh ? fast_gelu<T, true>(y) : fast_gelu<T, false>(y);
        } else {
          y = which == 0 ? scale * y : to_compute(rounded);
        }
        float of_tile[kGranule];
        four_numbers(broken ? NAN : y, of_tile);
        if (4 * q + row < batch()) {
          Granule of{};
          if constexpr (mlp) {
            of = granule(of_tile[0], of_tile[1], of_tile[2], of_tile[3]);
          } else {
#pragma unroll
            for (int i = 0; i < kGranule; ++i) of.element[i] = __float_as_uint(of_tile[i]);
          }
          send(of, to + (4 * q + row) * kStride + tile * 16, barrier);
        }
        const int slot = place_of(own_row(q)).slot;
        if (!mlp && which > 0 && slot >= 0 && has_row(q)) {
          T* const cache = in_cache<T>(which == 1 ? a.k_cache : a.v_cache, which == 1 ? a.k_stride : a.v_stride, layer,
                                       own_row(q), heads.first + tile * kGranule / (3 * kHead), slot);
          cache[in_head % kHead + g % kGranule] = rounded;  // read by later launches only
        }
      }
    }
  }

  // To the L2 cache, a line a lane, for the next layer.
  __device__ __forceinline__ void prefetch_keys(int of_layer) const {
    static_assert(2 * kWarpKeys == kWarpSize && kHead * 2 == 128);
    const int key = lane % kWarpKeys;
    if (of_layer >= s.layers) return;
    for (int b = 0; b < batch(); ++b) {
      if (key >= keys_of(b).count()) continue;
      for (int head = 0; head < heads.count(); ++head) {
        prefetch_to_l2(cached(lane >= kWarpKeys, of_layer, b, head) + key * kHead);
      }
    }
  }

  __device__ __forceinline__ void attend(OfKeys& ahead) {
    wait(&shared.qkv_full, layer, bytes_of_qkv(), Wanted::kQkv);
    record(Step::kQkv);
#pragma unroll 1
    for (int first = 0; first < batch() * kHeads; first += kAhead) attend(first, ahead);
    named_barrier_sync(kComputingOnly, kComputing);
    // All warps put the block's parts together, each a row's, and send them to as many blocks as there are rows.
    static_assert(kClusterWarps == kClusterBlocks && kClusterWarps % kBatch == 0);
    const int b = at.warp % kBatch;
    if (b >= batch() || broken) return;
#pragma unroll 1
    for (int head = 0; head < heads.count(); ++head) {
      const Attended of_block = together(shared.of_warps[b][head], {-INFINITY, 0, {0, 0}});
      float2* const part = shared.attended[b][head][at.block];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t to = remote_address(&shared, at.warp - b + i), barrier = there(to, &shared.attended_full);
        store_remote_async(there(to, part + lane), Pair<float>{of_block.out.x, of_block.out.y}, barrier);
        if (lane > 0) continue;
        store_remote_async(there(to, part + kHead / 2), Pair<float>{of_block.max, of_block.sum}, barrier);
      }
    }
  }
  // Some queries over the warp's keys. Where a key has been used, one of the next queries' is loaded.
  __device__ __forceinline__ void attend(int first, OfKeys& of) const {
    constexpr bool kMore = kBatch * kHeads > kAhead;
    Query now[kAhead];
    int most = 0;
    Vector<float, 4> q[kAhead][2][2];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      now[i] = query(first + i);
      most = max(most, now[i].keys);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const from = shared.qkv[now[i].b][now[i].head] + half * (kHead / 2) + t * 8;
        q[i][half][0] = load_vector<4>(from);
        q[i][half][1] = load_vector<4>(from + 4);
      }
    }
    float score[kAhead][kRounds] = {}, peak[kAhead], base[kAhead], sum[kAhead] = {}, out[kAhead][2] = {};
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      if (r * 8 >= most) continue;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const uint32_t pair = of[i].k[r][j / 4].element[j % 4];
          const Vector<float, 4>& of_q = q[i][j / 4][j % 4 / 2];
          score[i][r] += of_q.element[j % 2 * 2] * low_of<T>(pair);
          score[i][r] += of_q.element[j % 2 * 2 + 1] * high_of<T>(pair);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (kMore) load_keys(query(first + kAhead + i), of[i].k);
      peak[i] = -INFINITY;
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        score[i][r] += __shfl_xor_sync(kFullWarp, score[i][r], 1);
        score[i][r] += __shfl_xor_sync(kFullWarp, score[i][r], 2);
        if (r * 8 + g >= now[i].keys) score[i][r] = -INFINITY;
        peak[i] = fmaxf(peak[i], score[i][r]);
      }
#pragma unroll
      for (int apart = 4; apart < kWarpSize; apart *= 2) {
        peak[i] = fmaxf(peak[i], __shfl_xor_sync(kFullWarp, peak[i], apart));
      }
      base[i] = peak[i] == -INFINITY ? 0.0f : peak[i];
    }
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      if (r * 8 >= most) continue;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const float weight = exp2_approx(score[i][r] - base[i]);
        sum[i] += weight;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float of_key = __shfl_sync(kFullWarp, weight, j * 4);
          out[i][0] += of_key * low_of<T>(of[i].v[r * 8 + j]);
          out[i][1] += of_key * high_of<T>(of[i].v[r * 8 + j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (kMore) load_values(query(first + kAhead + i), of[i].v);
#pragma unroll
      for (int apart = 4; apart < kWarpSize; apart *= 2) sum[i] += __shfl_xor_sync(kFullWarp, sum[i], apart);
      if (!now[i].exists) continue;
      auto& of_warp = shared.of_warps[now[i].b][now[i].head][at.warp];
      of_warp[lane] = {out[i][0], out[i][1]};
      if (lane == 0) of_warp[kHead / 2] = {peak[i], sum[i]};
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
  // With the newest key, which no cache has yet.
  __device__ __forceinline__ Attended newest(int b, int head) const {
    const float *const q = shared.qkv[b][head], *const k = q + kHead, *const v = k + kHead;
    const float score = warp_sum(q[lane] * k[lane] + q[lane + kWarpSize] * k[lane + kWarpSize]);
    return {score, 1, {v[2 * lane], v[2 * lane + 1]}};
  }
  // A lane's two columns of attention's output, in two parts.
  __device__ __forceinline__ TwoParts attended(int b, int head, const Attended& newest) const {
    const Attended all = together(shared.attended[b][head], newest);
    const float inverse = reciprocal_approx(all.sum);
    return two_parts<T>(all.out.x * inverse, all.out.y * inverse);
  }
  // Operands b of the projection. Of one row each warp makes them for itself; of several a warp makes one row's for
  // all, where the first block's part of it was: nobody else reads the row's parts.
  __device__ __forceinline__ void of_attended(Operand (&x)[kBatch][kHeads]) {
    const int own = kBatch == 1 ? 0 : min(at.warp, batch() - 1);
    Attended of_newest[kHeads] = {};
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      if (head < heads.count()) of_newest[head] = newest(own, head);
    }
    wait(&shared.attended_full, layer, bytes_of_attended(), Wanted::kAttended);
    record(Step::kAttended);
    if constexpr (kBatch == 1) {
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        if (head >= heads.count()) continue;
        const TwoParts mine = attended(0, head, of_newest[head]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // a granule's values are in two lanes
          const int lane_of = 2 * (g / 2 * 4 + t) + i;
          const uint32_t high = __shfl_sync(kFullWarp, mine.high, lane_of),
                         low = __shfl_sync(kFullWarp, mine.low, lane_of);
          x[0][head].element[i] = g % 2 == 0 ? high : low;
        }
      }
    } else {
      const auto place = [&](int b, int head) { return reinterpret_cast<uint32_t*>(shared.attended[b][head][0]); };
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        if (head >= heads.count() || at.warp >= batch()) continue;
        const TwoParts mine = attended(own, head, of_newest[head]);
        __syncwarp();
        place(own, head)[lane / 2 * 4 + lane % 2] = mine.high;
        place(own, head)[lane / 2 * 4 + lane % 2 + 2] = mine.low;
      }
      named_barrier_sync(kComputingOnly, kComputing);
      each_row([&](int b, int of_batch) {
#pragma unroll
        for (int head = 0; head < kHeads; ++head) {
          x[b][head] = operand(reinterpret_cast<const unsigned char*>(place(of_batch, head)), 0);
        }
      });
    }
  }
  __device__ __forceinline__ void project(const OfHeads& w) {
    Operand x[kBatch][kHeads];
    of_attended(x);
    float of_groups[kGroups][kQuads] = {};
    Quad own[kGroups];
    each_row(
        [&](int b, int) {
          float sum[kGroups][4] = {};
#pragma unroll
          for (int head = 0; head < kHeads; ++head) {
            if (head >= heads.count()) continue;
#pragma unroll
            for (int i = 0; i < kGroups; ++i) {
              if (i < granules) multiply(sum[i], w[head][i], x[b][head]);
            }
          }
#pragma unroll
          for (int i = 0; i < kGroups; ++i) own[i][b % 4] = of_chunk(sum[i]);
        },
        [&](int q) {
#pragma unroll
          for (int i = 0; i < kGroups; ++i) of_groups[i][q] = over_chunks(own[i]);
        });
    publish<kAttention>(of_groups);
  }

  // ---- the MLP ----

  // Weights of the first groups, which come to registers before the hidden layer does.
  static constexpr int kBefore = kGroups < 4 ? kGroups : 2;
  using OfSecond = Vector16[kBefore][kMostUnits];
  __device__ __forceinline__ void take_of_second(OfSecond& w) {
#pragma unroll
    for (Vector16(&of_group)[kMostUnits] : w) take(units, of_group);
  }
  using OfHidden = Operand[kMostUnits];
  __device__ __forceinline__ void of_hidden(int b, OfHidden& x) const {
#pragma unroll
    for (int unit = 0; unit < kMostUnits; ++unit) {
      x[unit] = unit < units ? operand(shared.hidden[b], unit) : Operand{};
    }
  }
  __device__ __forceinline__ void second(const OfSecond& before) {
    wait(&shared.hidden_full, layer, bytes_of_hidden(), Wanted::kHidden);
    record(Step::kHidden);
    OfHidden x;
    float of_groups[kGroups][kQuads] = {};
    Quad own[kBefore];
    each_row(
        [&](int b, int of_batch) {
          of_hidden(of_batch, x);
          float sum[kBefore][4] = {};
#pragma unroll
          for (int unit = 0; unit < kMostUnits; ++unit) {
            if (unit >= units) continue;
#pragma unroll
            for (int i = 0; i < kBefore; ++i) multiply(sum[i], before[i][unit], x[unit]);
          }
#pragma unroll
          for (int i = 0; i < kBefore; ++i) own[i][b % 4] = of_chunk(sum[i]);
        },
        [&](int q) {
#pragma unroll
          for (int i = 0; i < kBefore; ++i) of_groups[i][q] = over_chunks(own[i]);
        });
#pragma unroll
    for (int i = kBefore; i < kGroups; ++i) {
      if (i >= granules) continue;
      Vector16 w[kMostUnits];
      take(units, w);
      each_row(
          [&](int b, int of_batch) {
            if (kBatch > 1) of_hidden(of_batch, x);
            float sum[2][4] = {};
#pragma unroll
            for (int unit = 0; unit < kMostUnits; ++unit) {
              if (unit < units) multiply(sum[unit % 2], w[unit], x[unit]);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) sum[0][j] += sum[1][j];
            own[0][b % 4] = of_chunk(sum[0]);
          },
          [&](int q) { of_groups[i][q] = over_chunks(own[0]); });
    }
    publish<kMlp>(of_groups);
  }

  // ---- behind the layers ----

  // Tile after tile of four rows, and the next token's place.
  __device__ __forceinline__ void logits() {
    wait_for_x(kMlp, s.layers);
    float2 norm[kQuads];
    wait_for_norm(kMlp, s.layers, norm);
    const Range tiles = s.logit_tiles(at);
    const auto* const numbers = reinterpret_cast<const float2*>(token.packed + s.rows_of(at, 0));
#pragma unroll 1
    for (int i = 0; i < tiles.count(); ++i) {
      const float2 of_row = __ldg(numbers + i * kGranule + g % kGranule);
      Weights w;
      float sum[kQuads] = {};
      take(true, w);
      product(w, shared.x[kMlp], sum);
      const int of_vocab = (tiles.first + i) * kGranule + g % kGranule;
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        const float y = normed(sum[q], norm[q], of_row);
        if (!has_row(q) || of_vocab >= s.vocab) continue;
        static_cast<T*>(a.logits)[int64_t{own_row(q)} * s.vocab + of_vocab] = from_compute<T>(broken ? NAN : y);
      }
    }
    // All blocks have read both: without what they sent there would be no x.
    if (blockIdx.x > 0 || threadIdx.x > 0) return;
    if (*const_cast<const volatile uint32_t*>(&state->wanted) == 0) {
      for (int b = 0; b < batch(); ++b) {
        const int slot = place_of(b).slot;
        if (slot >= 0) static_cast<volatile int32_t*>(a.end)[b] = slot + 1;
      }
    }
    *const_cast<volatile uint32_t*>(&state->epoch) = epoch + 1;
  }
};

}  // namespace kf::KF_BACKEND::decode_step
