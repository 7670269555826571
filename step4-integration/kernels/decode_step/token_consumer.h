// The consumers of v3_persistent: eight warps that multiply and attend.
#pragma once

#include <step1/approximate.h>
#include <step1/gelu.h>
#include <step2/mma.h>

#include "token_block.h"

namespace kf::KF_BACKEND::decode_step {

// kTrace: it records when it is where.
template <class T, bool kTrace>
struct Consumer : Block<T> {
  using Base = Block<T>;
  using Base::a, Base::block, Base::in_use, Base::messages, Base::part, Base::s, Base::shared, Base::slot, Base::state,
      Base::tag, Base::token;

  const int lane = threadIdx.x % kWarpSize, warp, g = lane / 4, t = lane % 4;
  unsigned char* const operand;
  Walk walk;
  float residual = 0;  // of the row that this lane of the first warp has

  __device__ __forceinline__ Consumer(const Token& t, Shared& memory, const Place& place, uint32_t epoch, int warp)
      : Base(t, memory, place, epoch), warp(warp), operand(memory.operand[warp]) {}

  __device__ __forceinline__ void record(int64_t at, long long value) const {
    if constexpr (kTrace) {
      if (warp == 0 && lane == 0) token.trace[block * trace_of_block(s) + at] = value;
    }
  }
  __device__ __forceinline__ void record(int step, Moment moment) const {
    if constexpr (kTrace) record(4 + step * kMomentKinds + static_cast<int>(moment), clock64());
  }
  __device__ __forceinline__ void record_both_clocks(int at) const {
    if constexpr (kTrace) {
      record(at, all_reduce::nanoseconds());
      record(at + 1, clock64());
    }
  }

  // Whether the warp has a part of x's depth, and of the hidden layer's.
  __device__ __forceinline__ bool has() const { return warp < s.units; }
  __device__ __forceinline__ bool has_hidden() const { return warp < s.hidden_units; }

  __device__ __forceinline__ const unsigned char* wait_for_tile(int bytes) {
    const int tile = walk.index, first = walk.next(bytes, kRingBytes);
    wait_for_phase<true>(&shared.full[tile % kSlots], tile / kSlots & 1, state, Wanted::kWeights, tile);
    return shared.ring + first;
  }
  __device__ __forceinline__ void free_tile() {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&shared.empty[(walk.index - 1) % kSlots]);
  }

  // Of x, or of LayerNorm's gain: what a lane has.
  using OfX = float[kOfMessage];

  // Σ x and Σ x² of a lane's values, to the helper.
  __device__ __forceinline__ void send_moments(int buffer, const OfX& x) {
    shared.moments[buffer][warp * kWarpSize + lane] = {x[0] + x[1] + x[2], x[0] * x[0] + x[1] * x[1] + x[2] * x[2]};
    __syncwarp();
    named_barrier_arrive(kMoments + buffer, kWithHelper);
  }

  // x·gain as operand b: a lane's values lie in three chunks.
  __device__ __forceinline__ void put(const OfX& x, const OfX& gain) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kOfMessage; ++i) {
      const TwoParts p = two_parts<T>(x[i] * gain[i], 0);
      uint16_t* const to = reinterpret_cast<uint16_t*>(operand + i * 128) + lane;
      to[0] = static_cast<uint16_t>(p.high);
      to[32] = static_cast<uint16_t>(p.low);
    }
  }
  __device__ __forceinline__ void take_gain(const unsigned char* tile, OfX& gain) const {
#pragma unroll
    for (int i = 0; i < kOfMessage; ++i) {
      const int column = warp * kUnit + kOfMessage * lane + i;
      gain[i] = low_of<T>(has() ? reinterpret_cast<const uint16_t*>(tile)[column] : 0);
    }
  }

  // x as the product in front has left it. Here and below a warp that has nothing to take waits as the others do: it
  // must not run ahead of them.
  __device__ __forceinline__ void receive_x(int at, uint32_t wanted, int layer, OfX& x) {
    const int number = warp * kWarpSize + lane;
    const Message* const from[1] = {messages + at + min(number, s.granules - 1)};
    const bool needed[1] = {true}, exists = has() && number < s.granules;
    Message message[1];
    wait_for(from, needed, message, wanted, state, Wanted::kX, layer);
#pragma unroll
    for (int i = 0; i < kOfMessage; ++i) x[i] = exists ? __uint_as_float(message[0].value[i]) : 0;
  }

  // The splits of a head put together: 24 lanes, four columns each.
  __device__ __forceinline__ void receive_attended(int layer) {
    const int of_split = s.width / kOfAttended, number = warp * (kUnit / kOfAttended) + lane;
    constexpr int kAtOnce = 4, kMost = up(kSplits, kAtOnce) * kAtOnce;
    const uint32_t of_layer = tag + layer;
    const bool takes = lane < kUnit / kOfAttended;
    const Message* const from = messages + s.attended_at + min(number, of_split - 1);
    Message message[kMost];
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      message[i] = {{0, 0, __float_as_uint(-INFINITY)}, takes && i < in_use ? ~of_layer : of_layer};
    }
    for (uint32_t polls = 1;; ++polls) {
      bool all = true;
#pragma unroll
      for (int first = 0; first < kMost; first += kAtOnce) {
        if (first >= in_use) continue;
#pragma unroll
        for (int i = first; i < first + kAtOnce; ++i) {
          if (message[i].tag != of_layer) message[i] = load_message(from + i * of_split);
        }
      }
#pragma unroll
      for (const Message& each : message) all = all && each.tag == of_layer;
      if (__all_sync(kFullWarp, all)) break;
      if (polls % kPollsBetweenLooks != 0) continue;
      if (__any_sync(kFullWarp, give_up(state, polls, Wanted::kAttended, layer))) {
        message[0].value[2] = 0x7fc00000u;
        break;
      }
    }
    __syncwarp();
    float max = -INFINITY, sum = 0, y[kOfAttended] = {};
#pragma unroll
    for (const Message& each : message) max = fmaxf(max, __uint_as_float(each.value[2]));
#pragma unroll
    for (int first = 0; first < kMost; first += kAtOnce) {
      if (first >= in_use) continue;
#pragma unroll
      for (int i = first; i < first + kAtOnce; ++i) {
        const auto& value = message[i].value;
        const float weight = exp2_approx(__uint_as_float(value[2]) - max);
        sum += weight;
#pragma unroll
        for (int j = 0; j < kOfAttended; j += 2) {
          y[j] += weight * low_of<T>(value[j / 2]);
          y[j + 1] += weight * high_of<T>(value[j / 2]);
        }
      }
    }
    const float inverse = takes && has() && number < of_split ? reciprocal_approx(sum) : 0;
    const TwoParts one = two_parts<T>(y[0] * inverse, y[1] * inverse);
    const TwoParts two = two_parts<T>(y[2] * inverse, y[3] * inverse);
    unsigned char* const to = operand + lane / 8 * 128 + lane % 8 * 8;
    if (!takes) return;
    store_8(to, one.high, two.high);
    store_8(to + 64, one.low, two.low);
  }

  __device__ __forceinline__ void receive_hidden(int layer) {
    const int last = s.hidden_granules - 1, number = warp * 2 * kWarpSize + lane;
    const Message* const first = messages + s.hidden_at;
    const Message* const from[2] = {first + min(number, last), first + min(number + kWarpSize, last)};
    const bool needed[2] = {true, true};
    Message message[2];
    wait_for(from, needed, message, tag + layer, state, Wanted::kHidden, layer);
    __syncwarp();
    const auto &u = message[0].value, &v = message[1].value;
    store_16(operand + lane * 16, {{u[0], u[1], u[2], v[0]}});
    store_8(operand + 512 + lane * 8, v[1], v[2]);
  }

  // Messages order nothing within a block. So once a layer all consumers meet: what they and the helper have read of
  // the layer in front may be written over. They would stand waiting for x anyway.
  __device__ __forceinline__ void end_layer() { named_barrier_sync(kConsumersOnly, kConsumerThreads); }

  // ---- products ----

  __device__ __forceinline__ static void multiply(float (&sum)[4], const Vector16& w, uint32_t b0, uint32_t b1) {
    mma_m16n8k16<T>(sum, {w.element[0], w.element[1], w.element[2], w.element[3]}, {b0, b1});
  }
  // Operand b: both parts of x are columns of it, and so are two chunks of the hidden layer.
  __device__ __forceinline__ Vector16 x_of(int chunk) const {
    return load_16(operand + chunk * 128 + (g & 1) * 64 + t * 16);
  }
  using Weights = Vector16[12];
  __device__ __forceinline__ void take_rows(const unsigned char* body, Rows rows, Weights& w) const {
    const unsigned char* const behind = body + rows.of_16 * s.depth * 32;
    const int first = 3 * (has() ? warp : 0);
    if (rows.of_16 != 0) {
      const unsigned char* const from = body + lane * 16;
#pragma unroll
      for (int i = 0; i < 6; ++i) w[i] = load_16(from + (first + i / 2) * 1024 + i % 2 * 512);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (rows.rest <= half * kRestRows) continue;
      const unsigned char* const from = behind + min(half * kRestRows + g, rows.rest - 1) * 64 + t * 16;
#pragma unroll
      for (int i = 0; i < 3; ++i) w[6 + half * 3 + i] = load_16(from + (first + i) * rows.rest * 64);
    }
  }
  using Sums = float[4][4];
  __device__ __forceinline__ void multiply_rows(Rows rows, const Weights& w, Sums& sum) const {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const Vector16 x = x_of(i);
      if (rows.of_16 != 0) {
        multiply(sum[0], w[2 * i], x.element[0], x.element[1]);
        multiply(sum[1], w[2 * i + 1], x.element[2], x.element[3]);
      }
      const bool upper = g & 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (rows.rest <= half * kRestRows) continue;
        multiply(sum[2 + half], w[6 + half * 3 + i], upper ? x.element[2] : x.element[0],
                 upper ? x.element[3] : x.element[1]);
      }
    }
  }
  // Of lanes with t = 0: rows g and g + 8 of 16, and row g of the rest.
  __device__ __forceinline__ void keep_rows(int step, Rows rows, const Sums& sum) const {
    if (rows.of_16 != 0) {
      keep(step, g, (sum[0][0] + sum[0][1]) + (sum[1][0] + sum[1][1]));
      keep(step, g + 8, (sum[0][2] + sum[0][3]) + (sum[1][2] + sum[1][3]));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (rows.rest <= half * kRestRows) continue;
      const float (&of_rest)[4] = sum[2 + half];
      const float all = of_rest[0] + of_rest[1] + __shfl_xor_sync(kFullWarp, of_rest[2] + of_rest[3], 1);
      keep(step, rows.of_16 * 16 + half * kRestRows + g, all);
    }
  }

  // The second product: eight rows at a time.
  __device__ __forceinline__ void take_second(const unsigned char* body, int rows, Weights& w) const {
    const int first = 12 * (has_hidden() ? warp : 0);
    const unsigned char* const from = body + min(g, rows - 1) * 64 + t * 16;
#pragma unroll
    for (int i = 0; i < 12; ++i) w[i] = load_16(from + (first + i) * rows * 64);
  }
  __device__ __forceinline__ void multiply_second(const Weights& w, Sums& sum) const {
#pragma unroll
    for (int i = 0; i < 6; ++i) {
      const Vector16 x = x_of(i);
      multiply(sum[i % 2 * 2], w[2 * i], x.element[0], x.element[1]);
      multiply(sum[i % 2 * 2 + 1], w[2 * i + 1], x.element[2], x.element[3]);
    }
  }
  __device__ __forceinline__ void keep_second(int step, int first, const Sums& sum) const {
    const float all =
        ((sum[0][0] + sum[1][0]) + (sum[2][0] + sum[3][0])) + ((sum[0][3] + sum[1][3]) + (sum[2][3] + sum[3][3]));
    keep(step, first + g, all);
  }

  // A row's sum over the warps.
  __device__ __forceinline__ float* sums_of(int step) const { return shared.sums[step & 3]; }
  __device__ __forceinline__ void keep(int step, int row, float sum) const {
    if (t == 0) sums_of(step)[row * kSumStride + warp] = sum;
  }
  __device__ __forceinline__ float sum_of_warps(int step, int of_row) const {
    const float* const row = sums_of(step) + min(of_row, kOutputs - 1) * kSumStride;
    const Vector<float, 4> one = load_vector<4>(row), two = load_vector<4>(row + 4);
    const auto &a = one.element, &b = two.element;
    return ((a[0] + a[1]) + (a[2] + a[3])) + ((b[0] + b[1]) + (b[2] + b[3]));
  }

  // ---- attention: 16 keys a warp, then eight columns a warp ----

  __device__ __forceinline__ void attend(int layer) {
    const int count = part.count;
    Vector16 k[2][2] = {};
    uint32_t v[4][4] = {};
    if (count > 0) {
      const unsigned char* const tile = wait_for_tile(count * kHead * 4);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned char* const key = tile + min(warp * 16 + i * 8 + g, count - 1) * 128 + t * 16;
        k[i][0] = load_16(key);
        k[i][1] = load_16(key + 64);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = min(i * kWarpSize + lane, count - 1);
        ldmatrix_transposed<4>(v[i], tile + (count + key) * 128 + warp * 16);
      }
      free_tile();
    }
    const Message* const from[1] = {messages + s.qkv_at + part.head * kHead + min(lane, 21)};
    const bool needed[1] = {true};
    Message message[1];
    wait_for(from, needed, message, tag + layer, state, Wanted::kQkv, layer);
    record(layer * kKinds + 1, Moment::kQueries);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kOfMessage; ++i) {
      const int column = lane * kOfMessage + i;
      if (column >= kHead) continue;
      const TwoParts p = two_parts<T>(__uint_as_float(message[0].value[i]), 0);
      uint16_t* const to = reinterpret_cast<uint16_t*>(operand) + column;
      to[0] = static_cast<uint16_t>(p.high);
      to[kHead] = static_cast<uint16_t>(p.low);
    }
    __syncwarp();
    float score[4];
    {
      const unsigned char* const q = operand + (g & 1) * 128 + t * 16;
      const Vector16 q0 = load_16(q), q1 = load_16(q + 64);
      float sum[2][2][4] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Vector16(&key)[2] = k[i];
        multiply(sum[i][0], {{q0.element[0], 0, q0.element[1], 0}}, key[0].element[0], key[0].element[1]);
        multiply(sum[i][1], {{q1.element[0], 0, q1.element[1], 0}}, key[1].element[0], key[1].element[1]);
        multiply(sum[i][0], {{q0.element[2], 0, q0.element[3], 0}}, key[0].element[2], key[0].element[3]);
        multiply(sum[i][1], {{q1.element[2], 0, q1.element[3], 0}}, key[1].element[2], key[1].element[3]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // keys 2t, 2t + 1, 2t + 8, 2t + 9; the other part of q is one row on
        float x = sum[i / 2][0][i % 2] + sum[i / 2][1][i % 2];
        x += __shfl_xor_sync(kFullWarp, x, 4);
        score[i] = warp * 16 + i / 2 * 8 + 2 * t + i % 2 < count ? x : -INFINITY;
      }
    }
    float max = fmaxf(fmaxf(score[0], score[1]), fmaxf(score[2], score[3]));
    max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 1));
    max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 2));
    const float base = max == -INFINITY ? 0.0f : max;
#pragma unroll
    for (float& each : score) each = exp2_approx(each - base);
    const TwoParts one = two_parts<T>(score[0], score[1]), two = two_parts<T>(score[2], score[3]);
    if (g < 2) store_8(shared.weights + lane * 80 + warp * 8, g ? one.low : one.high, g ? two.low : two.high);
    float sum = (score[0] + score[1]) + (score[2] + score[3]);
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
    if (lane == 0) shared.peaks[warp] = {max, sum};
    __syncwarp();
    named_barrier_sync(kScores, kWithHelper);

    float out[8][4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Vector16 p = load_16(shared.weights + (lane & 7) * 80 + i * 16);
      multiply(out[2 * i], {{p.element[0], 0, p.element[1], 0}}, v[i][0], v[i][1]);
      multiply(out[2 * i + 1], {{p.element[2], 0, p.element[3], 0}}, v[i][2], v[i][3]);
    }
    float most = -INFINITY, all = 0, o[2] = {};
#pragma unroll
    for (int i = 0; i <= kConsumers; ++i) most = fmaxf(most, shared.peaks[i].x);
    const float least_base = most == -INFINITY ? 0.0f : most;
#pragma unroll
    for (int i = 0; i <= kConsumers; ++i) {
      const float2 peak = shared.peaks[i];
      const float factor = exp2_approx(peak.x - least_base);
      all += factor * peak.y;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (i < kConsumers) {
          o[j] += factor * out[i < kConsumers ? i : 0][j];
        } else if ((g & 1) == 0) {
          o[j] += factor * shared.newest[warp * 8 + 2 * t + j];
        }
      }
    }
#pragma unroll
    for (float& each : o) each += __shfl_xor_sync(kFullWarp, each, 4);
    const float inverse = reciprocal_approx(all);
    const uint32_t mine = pack<T>(o[0] * inverse, o[1] * inverse);
    const uint32_t next = __shfl_down_sync(kFullWarp, mine, 1);
    if (lane == 0 || lane == 2) {
      store_message(messages + s.attended_at + part.split * (s.width / kOfAttended) +
                        part.head * (kHead / kOfAttended) + warp * 2 + lane / 2,
                    mine, next, __float_as_uint(most + __log2f(all)), tag + layer);
    }
    record(layer * kKinds + 1, Moment::kAttended);
  }

  // ---- the token ----

  // x begins with a mean of 0: LayerNorm, which is all that reads it, does not change, and its sums lose no digits.
  __device__ __forceinline__ void embed(const Line& projection, OfX& x) {
    const Tokens<T> tokens(a, 0);
    float sum = 0;
    const auto column = [&](int i) { return warp * kUnit + kOfMessage * lane + i; };
    const auto exists = [&](int i) { return has() && column(i) < s.width; };
#pragma unroll
    for (int i = 0; i < kOfMessage; ++i) {
      x[i] = exists(i) ? tokens.at(column(i)) : 0;
      sum += x[i];
    }
    const int row = projection.first + lane;
    const bool mine = warp == 0 && lane < projection.rows && row < s.width;
    if (mine) residual = tokens.at(row);
    sum = warp_sum(sum);
    if (lane == 0) shared.of_warp[warp] = sum;
    named_barrier_sync(kConsumersOnly, kConsumerThreads);
    float mean = 0;
#pragma unroll
    for (const float each : shared.of_warp) mean += each;
    mean /= static_cast<float>(s.width);
#pragma unroll
    for (int i = 0; i < kOfMessage; ++i) {
      if (exists(i)) x[i] -= mean;
    }
    if (mine) residual -= mean;
  }

  // A row of q k v that this lane sends: where it goes in the first layer's cache, if it is one of k or v.
  struct Sent {
    T* in_first;
    int64_t stride;  // to the next layer's
    bool is_query;
  };
  __device__ __forceinline__ Sent sent(const Line& qkv) const {
    const int row = qkv.first + lane;
    const int head = row / (3 * kHead), which = row % (3 * kHead) / kHead, d = row % kHead;
    const CacheStrides& stride = which == 1 ? a.k_stride : a.v_stride;
    if (which == 0 || lane >= qkv.rows || slot < 0) return {nullptr, 0, which == 0};
    return {in_cache<T>(which == 1 ? a.k_cache : a.v_cache, stride, 0, 0, head, slot) + d, stride.layer, false};
  }

  __device__ __forceinline__ void run() {
    record_both_clocks(0);
    float* const embedded = shared.logit_sums[warp] + lane;  // until the first product takes it, far from the logits
    {
      OfX x;
      embed(shared.lines[1], x);
#pragma unroll
      for (int i = 0; i < kOfMessage; ++i) embedded[i * kWarpSize] = x[i];
    }
    const Sent of_qkv = sent(shared.lines[0]);
#pragma unroll 1
    for (int step = 0; step < kKinds * s.layers; ++step) {
      const int layer = step / kKinds;
      const Kind kind = static_cast<Kind>(step % kKinds);
      const bool normed = step % 2 == 0, second = kind == Kind::kSecond;
      if (kind == Kind::kProjection && part.head >= 0) attend(layer);

      // Weights come to registers before x does.
      const Line p = shared.lines[step % kKinds];
      const unsigned char* tile = wait_for_tile(p.bytes);
      Weights w;
      const Rows rows = shared.tiles[step % kKinds][0].rows;
      OfX gain = {};
      float2 constants = {0, 0};
      if (second) {
        take_second(tile + p.body_at, rows.rest, w);
      } else {
        take_rows(tile + p.body_at, rows, w);
      }
      if (normed) take_gain(tile, gain);
      if (warp == 0 && lane < p.rows) {
        const float* const from = reinterpret_cast<const float*>(tile + p.constants_at);
        constants = normed ? float2{from[2 * lane], from[2 * lane + 1]} : float2{0, from[lane]};
      }
      free_tile();
      record(step, Moment::kWeights);

      if (normed) {
        OfX x;
        if (step > 0) {
          const bool qkv = kind == Kind::kQkv;
          if (qkv) end_layer();
          receive_x(qkv ? s.x_at : s.x_middle_at, tag + layer - (qkv ? 1 : 0), layer, x);
        } else {
#pragma unroll
          for (int i = 0; i < kOfMessage; ++i) x[i] = embedded[i * kWarpSize];
        }
        put(x, gain);
        send_moments(step / 2 & 1, x);
      } else if (second) {
        receive_hidden(layer);
      } else {
        receive_attended(layer);
      }
      __syncwarp();
      record(step, Moment::kInput);

      Sums sum = {};
      if (!second) {
        if (has()) multiply_rows(rows, w, sum);
        keep_rows(step, rows, sum);
      }
#pragma unroll 1
      for (int i = 0; second; ++i) {
        if (has_hidden()) multiply_second(w, sum);
        keep_second(step, i * kSecondRows, sum);
        if (i + 1 == p.tiles) break;
#pragma unroll
        for (auto& of_mma : sum) {
#pragma unroll
          for (float& each : of_mma) each = 0;
        }
        const TileLine line = shared.tiles[step % kKinds][i + 1];
        take_second(wait_for_tile(line.bytes), line.rows.rest, w);
        free_tile();
      }
      __syncwarp();
      record(step, Moment::kMultiplied);
      const int barrier = kSums + (step & 3), threads = normed ? kWithHelper : kConsumerThreads;
      if (warp != 0) {
        named_barrier_arrive(barrier, threads);
        continue;
      }
      named_barrier_sync(barrier, threads);
      record(step, Moment::kSummed);
      publish(step, layer, kind, p, constants, of_qkv);
      record(step, Moment::kSent);
    }
    logits();
  }

  // The first warp: a lane has a row.
  __device__ __forceinline__ void publish(int step, int layer, Kind kind, const Line& p, float2 constants,
                                          const Sent& of_qkv) {
    const bool sends = lane < p.rows;
    float y = sum_of_warps(step, lane);
    if (step % 2 == 0) {
      const float2 of_x = shared.mean_factor[step / 2 & 1];
      y = of_x.y * (y - of_x.x * constants.x);
    }
    y += constants.y;
    Message* to = messages;
    if (kind == Kind::kFc) {
      y = a.tanh ? fast_gelu<T, true>(y) : fast_gelu<T, false>(y);
      const uint32_t pair = pack<T>(y, __shfl_down_sync(kFullWarp, y, 1));
      const uint32_t two = __shfl_down_sync(kFullWarp, pair, 2), three = __shfl_down_sync(kFullWarp, pair, 4);
      to += s.hidden_at + (p.first + lane) / kOfHidden;
      if (sends && lane % kOfHidden == 0) store_message(to, pair, two, three, tag + layer);
      return;
    }
    const T rounded = from_compute<T>(y);
    if (kind == Kind::kQkv) {
      const float scale = token.scale_log2 / (a.scale_by_layer ? static_cast<float>(layer + 1) : 1.0f);
      y = of_qkv.is_query ? y * scale : to_compute(rounded);
      to += s.qkv_at;
    } else {
      residual += y;
      y = residual;
      to += kind == Kind::kProjection ? s.x_middle_at : s.x_at;
    }
    const float next = __shfl_down_sync(kFullWarp, y, 1), last = __shfl_down_sync(kFullWarp, y, 2);
    if (sends && lane % kOfMessage == 0) {
      store_message(to + (p.first + lane) / kOfMessage, __float_as_uint(y), __float_as_uint(next),
                    __float_as_uint(last), tag + layer);
    }
    if (kind == Kind::kQkv && of_qkv.in_first != nullptr) {
      of_qkv.in_first[layer * of_qkv.stride] = rounded;  // read by later launches only
    }
  }

  __device__ __forceinline__ void logits() {
    OfX gain, x;
    take_gain(wait_for_tile(s.depth * 2), gain);
    free_tile();
    end_layer();
    receive_x(s.x_at, tag + s.layers - 1, s.layers, x);
    record(kKinds * s.layers, Moment::kInput);
    put(x, gain);
    send_moments(0, x);
    __syncwarp();
    Vector16 of_x[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) of_x[i] = x_of(i);
    const int groups = s.logit_groups(block);
    const Range own = s.logits(block);
#pragma unroll 1
    for (int i = 0; i < groups; ++i) {
      float sum[2][4] = {};
      const unsigned char* const tile = wait_for_tile(s.logit_group_bytes());
      Vector16 w[6];
      const unsigned char* const from = tile + kLogitRows * 8 + (has() ? warp : 0) * 3 * 1024 + lane * 16;
#pragma unroll
      for (int j = 0; j < 6; ++j) w[j] = load_16(from + j * 512);
      if (warp == (i & 7) && lane < kLogitRows) {
        const float* const of_row = reinterpret_cast<const float*>(tile) + 2 * lane;
        shared.logit_constants[i * kLogitRows + lane] = {of_row[0], of_row[1]};
      }
      free_tile();
      if (has()) {
#pragma unroll
        for (int j = 0; j < 3; ++j) {
          multiply(sum[0], w[2 * j], of_x[j].element[0], of_x[j].element[1]);
          multiply(sum[1], w[2 * j + 1], of_x[j].element[2], of_x[j].element[3]);
        }
      }
      if (t == 0) {
        float* const to = shared.logit_sums[warp] + i * kLogitRows + g;
        to[0] = (sum[0][0] + sum[0][1]) + (sum[1][0] + sum[1][1]);
        to[8] = (sum[0][2] + sum[0][3]) + (sum[1][2] + sum[1][3]);
      }
    }
    __syncwarp();
    named_barrier_sync(kLastMoments, kWithHelper);
    const float2 of_norm = shared.mean_factor[0];
    T* const to = static_cast<T*>(a.logits) + own.first;
#pragma unroll 1
    for (int row = warp * kWarpSize + lane; row < own.count(); row += kConsumerThreads) {
      float y = 0;
#pragma unroll
      for (int w = 0; w < kConsumers; ++w) {
        if (w < s.units) y += shared.logit_sums[w][row];
      }
      const float2 constants = shared.logit_constants[row];
      to[row] = from_compute<T>(of_norm.y * (y - of_norm.x * constants.x) + constants.y);
    }
    record(kKinds * s.layers, Moment::kSent);
    record_both_clocks(2);
    // All blocks have read both: without what they sent there would be no x.
    if (block == 0 && warp == 0 && lane == 0) {
      if (slot >= 0 && *const_cast<const volatile uint32_t*>(&state->wanted) == 0) {
        *static_cast<volatile int32_t*>(a.end) = slot + 1;
      }
      *const_cast<volatile uint32_t*>(&state->epoch) = (tag - 1) / static_cast<uint32_t>(s.layers) + 1;
    }
  }
};

}  // namespace kf::KF_BACKEND::decode_step
