// What a block of v3_persistent does, step by step: asks for weights, waits for messages, multiplies, attends, sends.
#pragma once

#include <kf/launch.h>
#include <step1/gelu.h>
#include <step2/mma.h>

#include "messages.h"
#include "one_query.h"
#include "schedule.h"

namespace kf::KF_BACKEND::decode_step {

using kf::decode_step::Job;
using kf::decode_step::kGranule;
using kf::decode_step::kLogitRows;
using kf::decode_step::kMostAhead;
using kf::decode_step::kMostGranules;
using kf::decode_step::kMostJobs;
using kf::decode_step::kMostParts;
using kf::decode_step::kMostSplits;
using kf::decode_step::kOfMessage;
using kf::decode_step::kRounds;
using kf::decode_step::kTileGranules;
using kf::decode_step::Range;
using kf::decode_step::Schedule;

constexpr int kMostLayers = 64;
constexpr int kWarpsOfAnyWidth = 13;
constexpr int64_t kMostWidthHere = kWarpsOfAnyWidth * 128;  // 128 a warp
constexpr int kLanes = 8;                                   // of a key
constexpr int kDeep = 2;  // messages that a thread of the second product takes at once

struct Token {
  Args a;
  Schedule s;
  Layer layer[kMostLayers];
  float scale[kMostLayers];  // of scores, times log₂e
};

// The warp's sums of N values of each lane: lane l gets that of value l·N/32.
template <int N>
__device__ __forceinline__ float sum_of_lanes(float (&value)[N]) {
  const int lane = threadIdx.x % kWarpSize;
  int away = kWarpSize / 2;
#pragma unroll
  for (int half = N / 2; half > 0; half /= 2, away /= 2) {
    const bool upper = lane & away;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float other = upper ? value[i] : value[i + half];
      value[i] = (upper ? value[i + half] : value[i]) + __shfl_xor_sync(kFullWarp, other, away);
    }
  }
  for (; away > 0; away /= 2) value[0] += __shfl_xor_sync(kFullWarp, value[0], away);
  return value[0];
}

__device__ __forceinline__ void wait_for_copies(int newest) {
  switch (newest) {
    case 0: return cp_async_wait<0>();
    case 1: return cp_async_wait<1>();
    case 2: return cp_async_wait<2>();
    case 3: return cp_async_wait<3>();
    case 4: return cp_async_wait<4>();
    case 5: return cp_async_wait<5>();
    case 6: return cp_async_wait<6>();
    default: return cp_async_wait<7>();
  }
}

template <class T>
__device__ __forceinline__ void widen(const Vector16& bits, float (&value)[8]) {
  Vector<T, 8> vector;
  memcpy(&vector, &bits, sizeof vector);
  kf::KF_BACKEND::widen(vector, value);
}

template <class T>
__device__ __forceinline__ Vector16 rounded(const float (&value)[8]) {
  const Vector<T, 8> vector = narrow<T>(value);
  Vector16 bits;
  memcpy(&bits, &vector, sizeof bits);
  return bits;
}

template <class T, int kWidth>
struct Block {
  static constexpr int kMostWarps = kWidth == 0 ? kWarpsOfAnyWidth : kWidth / 128;
  const Token& token;
  const Args& a = token.a;
  const Schedule& s = token.s;
  const int thread = threadIdx.x, lane = thread % kWarpSize, warp = thread / kWarpSize;
  const int block = blockIdx.x;
  Message* const messages = static_cast<Message*>(a.scratch);
  Waiting waiting{reinterpret_cast<Failure*>(messages)};
  T* const operand;   // [warps][2][128]
  float* const sums;  // [2][product, Σ g·w, Σ b·w][warps][columns], and the warps' Σ x, Σ x²
  float* const hidden;
  float* const parts;  // [warps][head_dim], and the warps' maxima and sums
  Job* const jobs;
  Vector16* const ring;

  // The step that is done, and the one whose weights are asked for next: their numbers, and where the ring begins.
  int step = 0, ring_at = 0, asked_layer = 0, asked_step = 0, asked_at = 0;
  float x[kOfMessage];  // columns 4·thread to 4·thread + 3
  int slot, before, begin;
  int keys, splits;  // of a split at most; splits in use

  __device__ __forceinline__ Block(const Token& t, unsigned char* memory)
      : token(t),
        operand(reinterpret_cast<T*>(memory) + warp * 256),
        sums(reinterpret_cast<float*>(memory) + 128 * s.warps()),
        hidden(sums + 2 * s.sums_floats()),
        parts(hidden + s.width),
        jobs(reinterpret_cast<Job*>(parts + s.warps() * (s.head_dim + 2))),
        ring(reinterpret_cast<Vector16*>(memory + s.fixed_bytes())) {}

  // What is known when the kernel is compiled, if kWidth is not 0: divisions and addresses cost little then.
  __device__ __forceinline__ int width() const { return kWidth == 0 ? s.width : kWidth; }
  __device__ __forceinline__ int inner() const { return kWidth == 0 ? s.inner : 4 * kWidth; }
  __device__ __forceinline__ int head_dim() const { return kWidth == 0 ? s.head_dim : 64; }
  __device__ __forceinline__ int warps() const { return kWidth == 0 ? s.warps() : kMostWarps; }
  __device__ __forceinline__ int threads() const { return warps() * kWarpSize; }

  __device__ __forceinline__ Vector16& in_ring(int at, int of_thread) const {
    return ring[(at < s.ring ? at : at - s.ring) * threads() + of_thread];
  }

  // ---- weights on their way ----

  // Rows of `columns` granules. A warp's lanes ask for neighbouring granules, so that each sector comes once; they land
  // where the lane that has the row finds them.
  __device__ __forceinline__ void ask_for_product(const T* weight, int64_t width, const Job& job) {
    if (job.count == 0) return;
    const int granules = job.count;
#pragma unroll 1
    for (int chunk = 0; chunk * threads() * kOfMessage < job.depth; ++chunk) {
      const int of_warp = (chunk * threads() + warp * kWarpSize) * kOfMessage;
      const T* from = weight + static_cast<int64_t>(job.depth_first + of_warp) * width + job.first * kGranule;
#pragma unroll 1
      for (int v = 0; v < granules; ++v) {
        const int number = v * kWarpSize + lane;
        const int row = granules == 3 ? number / 3 : (granules == 2 ? number / 2 : number);
        const int granule = number - row * granules;
#pragma unroll
        for (int i = 0; i < kOfMessage; ++i) {
          const int k = row + i * kWarpSize;
          const bool wanted = of_warp + k < job.depth;
          const int at = asked_at + (chunk * kOfMessage + k % kOfMessage) * granules + granule;
          cp_async_16(&in_ring(at, warp * kWarpSize + k / kOfMessage),
                      wanted ? from + k * width + granule * kGranule : weight, wanted ? 16 : 0);
        }
      }
    }
  }

  // The first key after those of a split.
  __device__ __forceinline__ int last_key(int split) const { return min(before, (split + 1) * keys); }
  __device__ __forceinline__ int key_of(int split, int round) const {
    const int of_warp = kWarpSize / kLanes;
    return split * keys + (round * warps() + warp) * of_warp + lane / kLanes;
  }
  __device__ __forceinline__ const T* in_k(int layer, int head) const {
    return in_cache<const T>(a.k_cache, a.k_stride, layer, 0, head, begin) + lane % kLanes * 8;
  }
  __device__ __forceinline__ const T* in_v(int layer, int head) const {
    return in_cache<const T>(a.v_cache, a.v_stride, layer, 0, head, begin) + lane % kLanes * 8;
  }

  __device__ __forceinline__ void ask_for_keys(int layer, const Job& job) {
    if (job.count == 0 || job.depth_first >= splits) return;
    const T *k = in_k(layer, job.first), *v = in_v(layer, job.first);
    const bool has_columns = lane % kLanes * 8 < head_dim();
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int key = key_of(job.depth_first, round);
      const bool wanted = key < last_key(job.depth_first) && has_columns;
      const int64_t at = wanted ? key : 0;
      const uint32_t bytes = wanted ? 16 : 0;
      cp_async_16(&in_ring(asked_at + round, thread),
                  wanted ? k + at * a.k_stride.slot : static_cast<const T*>(a.k_cache), bytes);
      cp_async_16(&in_ring(asked_at + kRounds + round, thread),
                  wanted ? v + at * a.v_stride.slot : static_cast<const T*>(a.v_cache), bytes);
    }
  }

  __device__ __forceinline__ int logit_row(int turn) const {
    return s.logits_of(block).first + (turn * warps() + warp) * kLogitRows;
  }

  __device__ __forceinline__ void ask_for_logits(int turn) {
    const int first = logit_row(turn), last = s.logits_of(block).last,
              vectors = s.vectors[kf::decode_step::kKinds] / kLogitRows;
    const T* weight = static_cast<const T*>(a.token_weight);
    for (int r = 0; r < kLogitRows; ++r) {
      for (int j = 0; j < vectors; ++j) {
        const int k = (j * kWarpSize + lane) * kGranule;
        const bool wanted = first + r < last && k < width();
        cp_async_16(&in_ring(asked_at + r * vectors + j, thread),
                    weight + (wanted ? static_cast<int64_t>(first + r) * width() + k : 0), wanted ? 16 : 0);
      }
    }
  }

  // What is asked for makes a group, as nothing at all does.
  __device__ __forceinline__ void close(int vectors) {
    cp_async_commit();
    asked_at += vectors;
    if (asked_at >= s.ring) asked_at -= s.ring;
  }
  __device__ __forceinline__ void ask_for_next_logits() {
    __syncwarp();  // other lanes have read what is overwritten
    if (asked_step < s.logit_steps) ask_for_logits(asked_step++);
    close(s.vectors[kf::decode_step::kKinds]);
  }
  __device__ __forceinline__ void ask() {
    if (asked_layer == s.layers) return ask_for_next_logits();
    __syncwarp();
    const Job job = jobs[asked_step];
    const Layer& w = token.layer[asked_layer];
    if (job.kind == Kind::kAttention) {
      ask_for_keys(asked_layer, job);
    } else {  // one call: its code is long
      const bool qkv = job.kind == Kind::kQkv, fc = job.kind == Kind::kFc, second = job.kind == Kind::kSecond;
      const void* weight =
          qkv ? w.attention_weight : (fc ? w.fc_weight : (second ? w.second_weight : w.projection_weight));
      ask_for_product(static_cast<const T*>(weight), qkv ? 3 * width() : (fc ? inner() : width()), job);
    }
    close(s.vectors[static_cast<int>(job.kind)]);
    if (++asked_step == s.steps_of_layer()) {
      asked_step = 0;
      ++asked_layer;
    }
  }

  __device__ __forceinline__ void wait_for_weights() const {
    wait_for_copies(s.ahead - 1);
    __syncwarp();  // other lanes asked for some
  }

  __device__ __forceinline__ void end_of_step(int vectors) {
    ring_at += vectors;
    if (ring_at >= s.ring) ring_at -= s.ring;
    ++step;
  }

  // ---- x ----

  __device__ __forceinline__ bool has_columns() const { return thread * kOfMessage < width(); }

  // What the product in front has added.
  __device__ __forceinline__ void add_to_x(int at, uint32_t tag, Kind kind) {
    const Message* from[kMostParts];
    bool needed[kMostParts];
    Message message[kMostParts];
#pragma unroll
    for (int p = 0; p < kMostParts; ++p) {
      from[p] = messages + at + p * (width() / kOfMessage) + thread;
      needed[p] = p < s.parts && has_columns();
    }
    waiting.wait(from, needed, message, tag, kind);
#pragma unroll
    for (int p = 0; p < kMostParts; ++p) {
      if (!needed[p]) continue;
      float value[kOfMessage];
      values_of(message[p], value);
#pragma unroll
      for (int i = 0; i < kOfMessage; ++i) x[i] += value[i];
    }
  }

  // ---- products ----

  // Two rows of operand a, of the warp's 128 of the depth. Lane l has k = 4l + i; of those with the same i tensor cores
  // take lanes 0 to 15 first, and the weights lie so. In words: [t][i][which 16][which 8].
  struct Rows {
    uint32_t word[16];
  };
  __device__ __forceinline__ void put(int row, int i, T value) const {
    operand[row * 128 + ((lane % 8 / 2 * 16 + i * 4 + lane / 8) * 2) + lane % 2] = value;
  }
  __device__ __forceinline__ Rows rows() const {
    Rows rows{};
    if (lane < 8) {
      const uint32_t* from = reinterpret_cast<const uint32_t*>(operand + lane / 4 * 128) + lane % 4 * 16;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Vector16 four = load_vector<4>(from + 4 * i);
#pragma unroll
        for (int j = 0; j < 4; ++j) rows.word[4 * i + j] = four.element[j];
      }
    }
    return rows;
  }
  // A number as the sum of two T: together they have its digits.
  __device__ __forceinline__ Rows rows_of(const float (&value)[kOfMessage]) const {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kOfMessage; ++i) {
      const T high = from_compute<T>(value[i]);
      put(0, i, high);
      put(1, i, from_compute<T>(value[i] - to_compute(high)));
    }
    __syncwarp();
    return rows();
  }

  // Operand b of a granule and one i: 32 of the depth.
  using Weights = uint32_t[4];
  __device__ __forceinline__ void load_weights(Weights& w, int at) const {
    ldmatrix_transposed<4>(w, &in_ring(at, thread));
  }
  template <int kGranules>
  struct Sums {
    float of[kGranules][2][4] = {};  // two chains each: a product waits for the one before
    __device__ __forceinline__ void add(int g, const Weights& w, const Rows& rows, int i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        mma_m16n8k16<T>(of[g][h], {rows.word[4 * i + 2 * h], 0, rows.word[4 * i + 2 * h + 1], 0},
                        {w[2 * h], w[2 * h + 1]});
      }
    }
    __device__ __forceinline__ float at(int g, int e) const { return of[g][0][e] + of[g][1][e]; }
  };

  // Sums of this step: the warps' of the columns of granule `g`, of product 0, or of what LayerNorm needs, 1 and 2.
  __device__ __forceinline__ float* sums_of(int which, int of_warp) const {
    return sums + step % 2 * s.sums_floats() + (which * warps() + of_warp) * (kMostGranules * kGranule);
  }
  __device__ __forceinline__ float* moments(int of_warp) const {
    return sums + step % 2 * s.sums_floats() + 3 * warps() * (kMostGranules * kGranule) + 2 * of_warp;
  }
  // The two rows together.
  __device__ __forceinline__ void keep(int g, float first, float second) const {
    first += __shfl_xor_sync(kFullWarp, first, 4);
    second += __shfl_xor_sync(kFullWarp, second, 4);
    if (lane < 4) store_vector(sums_of(0, warp) + g * kGranule + 2 * lane, Vector<float, 2>{{first, second}});
  }
  __device__ __forceinline__ float sum_of_warps(int which, int column) const {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kMostWarps; ++w) {
      if (w < warps()) sum += sums_of(which, w)[column];
    }
    return sum;
  }

  // Columns `first` to `first` + 8·granules; each of the first warp's lanes has one.
  __device__ __forceinline__ void send(int at, int granules, float value, uint32_t tag) const {
    float four[kOfMessage] = {value};
#pragma unroll
    for (int i = 1; i < kOfMessage; ++i) four[i] = __shfl_down_sync(kFullWarp, value, i);
    if (lane < granules * kGranule && lane % kOfMessage == 0) {
      store_message(messages + at + lane / kOfMessage, message_of(four, tag));
    }
  }

  // Where in the cache a column of q k v goes, or nowhere.
  __device__ __forceinline__ T* cached(int column, int layer, bool exists) const {
    const int part = column / width(), within = column - part * width(), head = within / head_dim();
    if (part == 0 || slot < 0 || !exists) return nullptr;
    return (part == 1 ? in_cache<T>(a.k_cache, a.k_stride, layer, 0, head, slot)
                      : in_cache<T>(a.v_cache, a.v_stride, layer, 0, head, slot)) +
           (within - head * head_dim());
  }

  // LayerNorm and a product. wait() brings x; finish(prepare(column), sum) makes of a sum what is sent.
  template <class Prepare, class Wait, class Finish>
  __device__ __forceinline__ void normed_product(const Job& job, const void* ln_weight, const void* ln_bias,
                                                 const void* bias, int to, uint32_t tag, Prepare prepare, Wait wait,
                                                 Finish finish) {
    Weights w[kMostGranules][kOfMessage];
    float scale[kOfMessage] = {};
    __syncwarp();
    {
      Vector<T, kOfMessage> weights{}, biases{};
      if (has_columns()) {
        weights = load_vector<kOfMessage>(static_cast<const T*>(ln_weight) + thread * kOfMessage);
        biases = load_vector<kOfMessage>(static_cast<const T*>(ln_bias) + thread * kOfMessage);
      }
      kf::KF_BACKEND::widen(weights, scale);
#pragma unroll
      for (int i = 0; i < kOfMessage; ++i) {
        put(0, i, weights.element[i]);
        put(1, i, biases.element[i]);
      }
    }
    __syncwarp();
    const int column = job.first * kGranule + lane;
    const float of_bias =
        warp == 0 && lane < job.count * kGranule ? to_compute(static_cast<const T*>(bias)[column]) : 0;
    const auto target = prepare(column);
    {
      const Rows of_norm = rows();
      Sums<kMostGranules> sum;
#pragma unroll
      for (int g = 0; g < kMostGranules; ++g) {
        const int here = max(0, min(g, job.count - 1));  // one that is not there is another once more: no branch
#pragma unroll
        for (int i = 0; i < kOfMessage; ++i) {
          load_weights(w[g][i], ring_at + i * job.count + here);
          sum.add(g, w[g][i], of_norm, i);
        }
        if (lane < 8) {
          store_vector(sums_of(1 + lane / 4, warp) + g * kGranule + lane % 4 * 2,
                       Vector<float, 2>{{sum.at(g, 0), sum.at(g, 1)}});
        }
      }
    }

    wait();
    float moment[2] = {}, scaled[kOfMessage];
#pragma unroll
    for (int i = 0; i < kOfMessage; ++i) {
      moment[0] += x[i];
      moment[1] += x[i] * x[i];
      scaled[i] = x[i] * scale[i];
    }
    const Rows of_x = rows_of(scaled);
    Sums<kMostGranules> sum;
#pragma unroll
    for (int i = 0; i < kOfMessage; ++i) {
#pragma unroll
      for (int g = 0; g < kMostGranules; ++g) {
        sum.add(g, w[g][i], of_x, i);
      }
    }
    const float of_warp = sum_of_lanes(moment);
    if (lane % 16 == 0) moments(warp)[lane / 16] = of_warp;
#pragma unroll
    for (int g = 0; g < kMostGranules; ++g) {
      keep(g, sum.at(g, 0), sum.at(g, 1));
    }
    __syncthreads();
    if (warp == 0) {
      float total = 0, squares = 0;
#pragma unroll
      for (int i = 0; i < kMostWarps; ++i) {
        if (i >= warps()) continue;
        total += moments(i)[0];
        squares += moments(i)[1];
      }
      const float inverse = 1.0f / static_cast<float>(width());
      const float mean = total * inverse;
      const float factor = rsqrtf(fmaxf(squares * inverse - mean * mean, 0.0f) + static_cast<float>(a.eps));
      const int of_lane = min(lane, kMostGranules * kGranule - 1);
      const float y = factor * (sum_of_warps(0, of_lane) - mean * sum_of_warps(1, of_lane)) + sum_of_warps(2, of_lane);
      send(to + job.first * kGranule / kOfMessage, job.count, finish(target, y + of_bias), tag);
    }
  }

  // A part of a product's depth, of which a thread takes kAtOnce messages at a time; input(number, wanted, value) waits
  // for them. Its sums are added to x.
  template <int kAtOnce, class Input>
  __device__ __forceinline__ void part_product(const Job& job, int depth, const void* bias, int to, uint32_t tag,
                                               Input input) {
    if (job.count > 0) {
      const int column = job.first * kGranule + lane;
      const float of_bias = warp == 0 && lane < kTileGranules * kGranule && job.depth_first == 0
                                ? to_compute(static_cast<const T*>(bias)[column])
                                : 0;
      Sums<kTileGranules> sum;
#pragma unroll 1
      for (int chunk = 0; chunk * threads() * kOfMessage < depth; chunk += kAtOnce) {
        Weights w[kAtOnce][kOfMessage][kTileGranules];
        const int here = chunk * threads() + thread;
        bool wanted[kAtOnce];
#pragma unroll
        for (int m = 0; m < kAtOnce; ++m) {
          wanted[m] = (here + m * threads()) * kOfMessage < depth;
          if ((chunk + m) * threads() * kOfMessage >= depth) continue;
          const int at = ring_at + (chunk + m) * kOfMessage * kTileGranules;
#pragma unroll
          for (int i = 0; i < kOfMessage; ++i) {
#pragma unroll
            for (int g = 0; g < kTileGranules; ++g) load_weights(w[m][i][g], at + i * kTileGranules + g);
          }
        }
        float value[kAtOnce][kOfMessage];
        input(job.depth_first / kOfMessage + here, wanted, value);
#pragma unroll
        for (int m = 0; m < kAtOnce; ++m) {
          if ((chunk + m) * threads() * kOfMessage >= depth) continue;
#pragma unroll
          for (int i = 0; i < kOfMessage; ++i) value[m][i] = wanted[m] ? value[m][i] : 0;
          const Rows of_input = rows_of(value[m]);
#pragma unroll
          for (int i = 0; i < kOfMessage; ++i) {
#pragma unroll
            for (int g = 0; g < kTileGranules; ++g) sum.add(g, w[m][i][g], of_input, i);
          }
        }
      }
#pragma unroll
      for (int g = 0; g < kTileGranules; ++g) keep(g, sum.at(g, 0), sum.at(g, 1));
      __syncthreads();
      if (warp == 0) {
        const float y = sum_of_warps(0, min(lane, kTileGranules * kGranule - 1)) + of_bias;
        const int part = job.depth_first / depth;
        send(to + part * (width() / kOfMessage) + job.first * kGranule / kOfMessage, kTileGranules, y, tag);
      }
    }
  }

  // ---- attention ----

  __device__ __forceinline__ void attend(const Job& job, int layer, uint32_t tag) {
    const int head = job.first, split = job.depth_first;
    if (job.count > 0 && split < splits) {
      const int column = lane % kLanes * 8, of_head = head_dim() / kOfMessage;
      const bool with_columns = column < head_dim();
      Vector16 k[kRounds], v[kRounds];
#pragma unroll
      for (int round = 0; round < kRounds; ++round) {
        k[round] = in_ring(ring_at + round, thread);
        v[round] = in_ring(ring_at + kRounds + round, thread);
      }
      // Of q, and for one group of all lanes of the newest key and value.
      const bool newest = warp == 0 && split == splits - 1;
      const Message* from[6];
      bool needed[6];
      Message message[6];
#pragma unroll
      for (int i = 0; i < 6; ++i) {
        from[i] = messages + s.qkv_at() + (i / 2 * s.heads + head) * of_head + column / kOfMessage + i % 2;
        needed[i] = with_columns && (i < 2 || newest);
      }
      waiting.wait(from, needed, message, tag, Kind::kQkv);
      float of[3][8] = {};
#pragma unroll
      for (int i = 0; i < 6; ++i) {
        float value[kOfMessage];
        values_of(message[i], value);
#pragma unroll
        for (int j = 0; j < kOfMessage; ++j) of[i / 2][i % 2 * kOfMessage + j] = needed[i] ? value[j] : 0;
      }
      Attending own;
#pragma unroll
      for (int j = 0; j < 8; ++j) own.q[j] = of[0][j] * token.scale[layer];
      const auto over_key = [](float part) {
#pragma unroll
        for (int away = kLanes / 2; away > 0; away /= 2) part += __shfl_xor_sync(kFullWarp, part, away);
        return part;
      };
      const int last = last_key(split);
      const auto take = [&](int first_round) {
        float score[kRounds];
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
          score[round] = over_key(own.product<T>(k[round]));
          if (key_of(split, first_round + round) >= last) score[round] = -INFINITY;
        }
        own.take<T>(score, v);
      };
      take(0);
      for (int round = kRounds; key_of(split, round) - lane / kLanes < last; round += kRounds) {
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
          const int key = key_of(split, round + i);
          k[i] = v[i] = Vector16{};
          if (key >= last || !with_columns) continue;
          k[i] = load_vector<4>(reinterpret_cast<const uint32_t*>(in_k(layer, head) + key * a.k_stride.slot));
          v[i] = load_vector<4>(reinterpret_cast<const uint32_t*>(in_v(layer, head) + key * a.v_stride.slot));
        }
        take(round);
      }
      const float of_newest[1] = {over_key(own.product<T>(rounded<T>(of[1])))};
      const Vector16 newest_v[1] = {rounded<T>(of[2])};
      if (newest && lane < kLanes) own.take<T>(of_newest, newest_v);
      own.merge<kLanes>();
      if (lane < kLanes && with_columns) {
#pragma unroll
        for (int j = 0; j < 8; ++j) parts[warp * head_dim() + column + j] = own.out[j];
      }
      float* const of_warps = parts + warps() * head_dim();
      if (lane == 0) {
        of_warps[2 * warp] = own.max;
        of_warps[2 * warp + 1] = own.sum;
      }
      __syncthreads();
      if (warp == 0 && lane < of_head) {
        float max = -INFINITY, sum = 0, out[kOfMessage] = {};
        for (int w = 0; w < warps(); ++w) max = fmaxf(max, of_warps[2 * w]);
        for (int w = 0; w < warps(); ++w) {
          const float weight = exp2_approx(of_warps[2 * w] - (max == -INFINITY ? 0.0f : max));
          sum += weight * of_warps[2 * w + 1];
#pragma unroll
          for (int i = 0; i < kOfMessage; ++i) out[i] += weight * parts[w * head_dim() + lane * kOfMessage + i];
        }
#pragma unroll
        for (int i = 0; i < kOfMessage; ++i) out[i] *= reciprocal_approx(sum);
        const Vector<T, kOfMessage> four = narrow<T>(out);
        Message m{{0, 0, __float_as_uint(max + log2f(sum)), tag}};
        memcpy(&m, &four, sizeof four);
        store_message(messages + s.attended_at() + (head * s.splits + split) * of_head + lane, m);
      }
    }
  }

  // Of four columns: the splits of their head, put together.
  __device__ __forceinline__ void attended(int number, bool wanted, float (&value)[kOfMessage], uint32_t tag) {
    const int of_head = head_dim() / kOfMessage, head = number / of_head;
    const Message* from[kMostSplits];
    bool needed[kMostSplits];
    Message message[kMostSplits];
#pragma unroll
    for (int i = 0; i < kMostSplits; ++i) {
      from[i] = messages + s.attended_at() + (head * s.splits + i) * of_head + number % of_head;
      needed[i] = wanted && i < splits;
    }
    waiting.wait(from, needed, message, tag, Kind::kAttention);
    float max = -INFINITY, sum = 0;
#pragma unroll
    for (int i = 0; i < kMostSplits; ++i) {
      if (needed[i]) max = fmaxf(max, __uint_as_float(message[i].element[2]));
    }
#pragma unroll
    for (int j = 0; j < kOfMessage; ++j) value[j] = 0;
#pragma unroll
    for (int i = 0; i < kMostSplits; ++i) {
      if (!needed[i]) continue;
      const float weight = exp2_approx(__uint_as_float(message[i].element[2]) - max);
      Vector<T, kOfMessage> four;
      memcpy(&four, &message[i], sizeof four);
      float of_split[kOfMessage];
      kf::KF_BACKEND::widen(four, of_split);
      sum += weight;
#pragma unroll
      for (int j = 0; j < kOfMessage; ++j) value[j] += weight * of_split[j];
    }
#pragma unroll
    for (int j = 0; j < kOfMessage; ++j) value[j] *= reciprocal_approx(sum);
  }

  // ---- the token ----

  __device__ __forceinline__ float sum_of_block(float value) {
    value = warp_sum(value);
    __syncthreads();
    if (lane == 0) hidden[warp] = value;
    __syncthreads();
    float sum = 0;
    for (int w = 0; w < warps(); ++w) sum += hidden[w];
    return sum;
  }

  __device__ __forceinline__ void begin_token() {
    for (int i = thread; i < s.steps_of_layer(); i += threads()) jobs[i] = s.job(block, i);
    const Place place(a, 0);
    begin = place.begin;
    slot = place.slot;
    before = place.before();
    splits = min(s.splits, max(1, (before + kKeysOfSplit - 1) / kKeysOfSplit));
    keys = (before + splits - 1) / splits;
    const Tokens<T> tokens(a, 0);
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < s.ahead; ++i) ask();
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kOfMessage; ++i) {
      x[i] = has_columns() ? tokens.at(thread * kOfMessage + i) : 0;
      sum += x[i];
    }
    const float mean = sum_of_block(sum) / static_cast<float>(width());
#pragma unroll
    for (int i = 0; i < kOfMessage; ++i) x[i] = has_columns() ? x[i] - mean : 0;
  }
  static constexpr int kKeysOfSplit = 64;

  __device__ __forceinline__ void run_step(const Job& job, bool first, int layer) {
    const Layer& w = token.layer[layer];
    const uint32_t tag = layer + 1;
    switch (job.kind) {
      case Kind::kQkv:
      case Kind::kFc: {
        const bool qkv = job.kind == Kind::kQkv;
        const auto add = [&] {
          if (!first || (qkv && layer == 0)) return;
          add_to_x(qkv ? s.second_at() : s.projected_at(), qkv ? tag - 1 : tag,
                   qkv ? Kind::kSecond : Kind::kProjection);
        };
        const auto prepare = [&](int column) {
          return qkv ? cached(column, layer, warp == 0 && lane < job.count * kGranule) : nullptr;
        };
        const auto finish = [&](T* in_cache, float sum) {
          if (!qkv) return a.tanh ? fast_gelu<T, true>(sum) : fast_gelu<T, false>(sum);
          if (in_cache == nullptr) return sum;
          *in_cache = from_compute<T>(sum);  // keys and values are rounded for this token as for later ones
          return to_compute(from_compute<T>(sum));
        };
        return normed_product(job, qkv ? w.ln_1_weight : w.ln_2_weight, qkv ? w.ln_1_bias : w.ln_2_bias,
                              qkv ? w.attention_bias : w.fc_bias, qkv ? s.qkv_at() : s.hidden_at(), tag, prepare, add,
                              finish);
      }
      case Kind::kAttention: return attend(job, layer, tag);
      case Kind::kProjection:
        return part_product<1>(job, width() / s.parts, w.projection_bias, s.projected_at(), tag,
                               [&](int number, const bool (&wanted)[1], float (&value)[1][kOfMessage]) {
                                 attended(wanted[0] ? number : 0, wanted[0], value[0], tag);
                               });
      default:
        return part_product<kDeep>(job, inner() / s.parts, w.second_bias, s.second_at(), tag,
                                   [&](int number, const bool (&wanted)[kDeep], float (&value)[kDeep][kOfMessage]) {
                                     const Message* from[kDeep];
                                     Message message[kDeep];
#pragma unroll
                                     for (int m = 0; m < kDeep; ++m) {
                                       from[m] = messages + s.hidden_at() + number + m * threads();
                                     }
                                     waiting.wait(from, wanted, message, tag, Kind::kFc);
#pragma unroll
                                     for (int m = 0; m < kDeep; ++m) values_of(message[m], value[m]);
                                   });
    }
  }

  __device__ __forceinline__ void run_layers() {
#pragma unroll 1
    for (int i = 0, layer = 0; layer < s.layers;) {
      const Job job = jobs[i];
      wait_for_weights();
      run_step(job, i == s.begin[static_cast<int>(job.kind)], layer);
      ask();
      end_of_step(s.vectors[static_cast<int>(job.kind)]);
      if (++i == s.steps_of_layer()) {
        i = 0;
        ++layer;
      }
    }
  }

  __device__ __forceinline__ void logits() {
    add_to_x(s.second_at(), s.layers, Kind::kSecond);
    const float inverse = 1.0f / static_cast<float>(width());
    float sum = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < kOfMessage; ++i) sum += x[i];
    const float mean = sum_of_block(sum) * inverse;
#pragma unroll
    for (int i = 0; i < kOfMessage; ++i) {
      x[i] = has_columns() ? x[i] - mean : 0;
      squares += x[i] * x[i];
    }
    const float factor = rsqrtf(sum_of_block(squares) * inverse + static_cast<float>(a.eps));
    __syncthreads();
    if (has_columns()) {
#pragma unroll
      for (int i = 0; i < kOfMessage; ++i) {
        const int column = thread * kOfMessage + i;
        hidden[column] = x[i] * factor * to_compute(static_cast<const T*>(a.ln_weight)[column]) +
                         to_compute(static_cast<const T*>(a.ln_bias)[column]);
      }
    }
    __syncthreads();
    const int vectors = s.vectors[kf::decode_step::kKinds] / kLogitRows, last = s.logits_of(block).last;
#pragma unroll 1
    for (int turn = 0; turn < s.logit_steps; ++turn) {
      wait_for_weights();
      float of_row[kLogitRows] = {};
      for (int j = 0; j < vectors; ++j) {
        const int k = (j * kWarpSize + lane) * kGranule;
        if (k >= width()) break;
        float h[kGranule];
#pragma unroll
        for (int i = 0; i < kGranule; ++i) h[i] = hidden[k + i];
#pragma unroll
        for (int r = 0; r < kLogitRows; ++r) {
          float w[kGranule];
          widen<T>(in_ring(ring_at + r * vectors + j, thread), w);
#pragma unroll
          for (int i = 0; i < kGranule; ++i) of_row[r] += h[i] * w[i];
        }
      }
      const float of_lane = sum_of_lanes(of_row);
      const int row = logit_row(turn) + lane / (kWarpSize / kLogitRows);
      if (lane % (kWarpSize / kLogitRows) == 0 && row < last) static_cast<T*>(a.logits)[row] = from_compute<T>(of_lane);
      ask_for_next_logits();
      end_of_step(s.vectors[kf::decode_step::kKinds]);
    }
    // All blocks have read it: without their keys there would be no x.
    if (block == 0 && thread == 0 && slot >= 0 && !waiting.gave_up) *static_cast<volatile int32_t*>(a.end) = slot + 1;
  }
};

}  // namespace kf::KF_BACKEND::decode_step
