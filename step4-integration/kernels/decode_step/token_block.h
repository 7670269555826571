// What a block of v3_persistent does: one lane streams weights and keys, eight warps multiply and attend
// (token_consumer.h), one more warp does what would stand in their way.
#pragma once

#include <kf/launch.h>
#include <step1/vector.h>
#include <step2/mma.h>
#include <step2/tma.h>
#include <step2/warpgroup.h>

#include <type_traits>

#include "../all_reduce/words.h"
#include "messages.h"
#include "pack.h"
#include "place.h"

namespace kf::KF_BACKEND::decode_step {

using Vector16 = Vector<uint32_t, 4>;

constexpr int kConsumerThreads = kConsumers * kWarpSize;
constexpr int kProducerWarp = kConsumers, kHelperWarp = kConsumers + 1;
constexpr int kTokenThreads = kConsumerThreads + 2 * kWarpSize;
constexpr int kWithHelper = kConsumerThreads + kWarpSize;
constexpr int kSumStride = 12;  // floats of a row's sums, one a warp: no bank conflict either way

// Named barriers. Sums have four, taken in turn: a warp may be as far ahead.
enum Barrier { kSums = 1, kMoments = 5, kScores = 7, kLastMoments = 8, kConsumersOnly = 9 };

// A recorded token (pages/token_trace.cu): when a block's first warp was how far. Of each product, attention's beside
// the projection's, and of the logits.
enum class Moment { kQueries, kAttended, kWeights, kInput, kMultiplied, kSummed, kSent };
constexpr int kMomentKinds = 7;
// Of a block, in its multiprocessor's cycles. In front: the GPU's clock in nanoseconds and this one, at the beginning
// and at the end.
KF_BOTH int64_t trace_of_block(const Schedule& s) { return 4 + (kKinds * s.layers + 1) * kMomentKinds; }

struct Token {
  Args a;
  Schedule s;
  unsigned char* packed;
  float scale_log2, eps;
  long long* trace;  // [blocks, trace_of_block], or null
};

// Of each tile of a layer, worked out once: whether it has 16 rows together, and up to 15 more.
struct Rows {
  int of_16, rest;
};
struct alignas(16) TileLine {
  Rows rows;
  int bytes;
};
// A product's rows in this block, and its first tile.
struct Line {
  int first, rows, tiles, constants_at, body_at, bytes;
};

struct alignas(128) Shared {
  unsigned char ring[kRingBytes];
  // x in two parts, [chunk][part][64 bytes]; hidden, [chunk][64 bytes].
  unsigned char operand[kConsumers][kHiddenUnit * 2];
  float logit_sums[kConsumers][kLogits];
  float2 logit_constants[kLogits];
  float sums[4][kOutputs * kSumStride];
  float2 moments[2][kConsumerThreads];  // Σ x, Σ x² of each lane
  float2 mean_factor[2];
  float2 peaks[12];  // attention: of each warp's 16 keys the greatest score and the sum of weights; [8]: the newest's
  float newest[kHead];            // its value
  float qkv_newest[192];          // q, k, v of the helper's head
  unsigned char weights[8 * 80];  // of keys: [part·4 + t][warp][8 bytes]
  float of_warp[kConsumers];
  uint64_t full[kSlots], empty[kSlots];
  Line lines[kKinds];
  TileLine tiles[kKinds][kTiles];
  int first[kSlots], last[kSlots];  // where the tiles on their way lie
};

// Of bfloat16 the upper half of a float, of float16 a conversion.
template <class T>
__device__ __forceinline__ float low_of(uint32_t pair) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __uint_as_float(pair << 16);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(pair)));
}
template <class T>
__device__ __forceinline__ float high_of(uint32_t pair) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __uint_as_float(pair & 0xffff0000u);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16)));
}

// Two floats as the sum of two T each: an upper one, and what is missing, rounded. A bfloat16 is cut off.
struct TwoParts {
  uint32_t high, low;
};
template <class T>
__device__ __forceinline__ TwoParts two_parts(float x, float y) {
  const uint32_t high =
      std::is_same_v<T, __nv_bfloat16> ? __byte_perm(__float_as_uint(x), __float_as_uint(y), 0x7632) : pack<T>(x, y);
  return {high, pack<T>(x - low_of<T>(high), y - high_of<T>(high))};
}

// Packed weights of another model. Every block finds the same: nobody is waited for.
template <class T>
__device__ __noinline__ void refuse(const Args& a, unsigned char* packed) {
  const int64_t first = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  for (int64_t i = first; i < a.batch * a.vocab; i += int64_t{gridDim.x} * blockDim.x) {
    static_cast<T*>(a.logits)[i] = from_compute<T>(NAN);
  }
  if (first == 0) reinterpret_cast<volatile State*>(packed)->wanted = static_cast<uint32_t>(Wanted::kLabel);
}

__device__ __forceinline__ Vector16 load_16(const unsigned char* from) {
  return load_vector<4>(reinterpret_cast<const uint32_t*>(from));
}
__device__ __forceinline__ void store_16(unsigned char* to, const Vector16& v) {
  store_vector(reinterpret_cast<uint32_t*>(to), v);
}
__device__ __forceinline__ void store_8(unsigned char* to, uint32_t a, uint32_t b) {
  store_vector(reinterpret_cast<uint32_t*>(to), Vector<uint32_t, 2>{{a, b}});
}

// The same in all warps' lanes, and known to be.
template <class T>
struct Block {
  const Token& token;
  const Args& a;
  const Schedule& s;
  Shared& shared;
  State* const state;
  Message* const messages;
  const int block, keys, slot, begin, in_use;  // in_use: parts of a head
  const Part part;
  const uint32_t tag;  // of layer 0

  __device__ __forceinline__ Block(const Token& t, Shared& memory, const Place& place, uint32_t epoch)
      : token(t),
        a(t.a),
        s(t.s),
        shared(memory),
        state(reinterpret_cast<State*>(t.packed)),
        messages(reinterpret_cast<Message*>(t.packed)),
        block(blockIdx.x),
        keys(place.before()),
        slot(place.slot),
        begin(place.begin),
        in_use(t.s.splits_of(place.before())),
        part(t.s.part(blockIdx.x, place.before())),
        tag(epoch * static_cast<uint32_t>(t.s.layers) + 1) {}

  __device__ __forceinline__ bool has_newest() const { return part.head >= 0 && part.split == in_use - 1; }
};

// ---- the producer: one lane ----

template <class T>
struct Producer : Block<T> {
  using Base = Block<T>;
  using Base::Base, Base::a, Base::begin, Base::block, Base::part, Base::s, Base::shared, Base::state, Base::token;
  Walk walk;
  int oldest = 0, asked = 0;
  bool gave_up = false;

  // Waits until the tile's place is free. −1: in vain.
  __device__ __forceinline__ int room(int bytes) {
    const int index = walk.index, end = walk.at, first = walk.next(bytes, kRingBytes);
    const Tile tile{index, first, first + bytes};
#pragma unroll 1
    for (; oldest < index && !gave_up; ++oldest) {
      const int slot = oldest % kSlots;
      if (!in_the_way({oldest, shared.first[slot], shared.last[slot]}, tile, end)) break;
      gave_up = !wait_for_phase<false>(&shared.empty[slot], oldest / kSlots & 1, state, Wanted::kRoom, index);
    }
    shared.first[index % kSlots] = tile.first;
    shared.last[index % kSlots] = tile.last;
    return gave_up ? -1 : first;
  }

  // Two pieces; the first one may be empty.
  __device__ __forceinline__ void bring(const void* one, int bytes, const void* two, int more) {
    const int slot = walk.index % kSlots, first = room(bytes + more);
    if (first < 0) return;
    mbarrier_arrive_expect_tx(&shared.full[slot], bytes + more);
    if (bytes > 0) bulk_load(shared.ring + first, one, bytes, &shared.full[slot]);
    if (more > 0) bulk_load(shared.ring + first + bytes, two, more, &shared.full[slot]);
    asked = walk.index;
  }

  __device__ __forceinline__ const T* cached(void* cache, const CacheStrides& stride, int layer) const {
    return in_cache<const T>(cache, stride, layer, 0, part.head, begin + part.first);
  }

  __device__ __noinline__ void run() {
    const unsigned char* from = token.packed + s.streams_at + block * s.stride;
    const unsigned char* gains = token.packed + s.gains_at;
#pragma unroll 1
    for (int step = 0; step < s.layers * kKinds && !gave_up; ++step) {
      const Line& line = shared.lines[step % kKinds];
      const int gain = line.constants_at;  // which lies in front of them
      bring(gains, gain, from, line.bytes - gain);
      gains += gain;
      from += line.bytes - gain;
#pragma unroll 1
      for (int tile = 1; tile < line.tiles && !gave_up; ++tile) {
        const int bytes = shared.tiles[step % kKinds][tile].bytes;
        bring(nullptr, 0, from, bytes);
        from += bytes;
      }
      if (step % kKinds != 0 || part.count == 0) continue;
      const int layer = step / kKinds, bytes = part.count * kHead * 2;
      bring(cached(a.k_cache, a.k_stride, layer), bytes, cached(a.v_cache, a.v_stride, layer), bytes);
    }
    if (!gave_up) bring(gains, s.depth * 2, nullptr, 0);
    const int groups = s.logit_groups(block);
#pragma unroll 1
    for (int i = 0; i < groups && !gave_up; ++i) {
      bring(nullptr, 0, from, s.logit_group_bytes());
      from += s.logit_group_bytes();
    }
    // Nothing may be on its way when the block ends.
#pragma unroll 1
    for (int i = max(0, asked - kSlots); i < asked; ++i) {
      if (!wait_for_phase<false>(&shared.full[i % kSlots], i / kSlots & 1, state, Wanted::kWeights, i)) return;
    }
  }
};

// ---- the helper: a warp ----

// LayerNorm's mean and factor, and the newest key's score.
template <class T>
struct Helper : Block<T> {
  using Base = Block<T>;
  using Base::Base, Base::has_newest, Base::messages, Base::part, Base::s, Base::shared, Base::state, Base::tag,
      Base::token;

  __device__ __forceinline__ void run() {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll 1
    for (int norm = 0; norm <= 2 * s.layers; ++norm) {  // even: before q k v, and attention after it; the last: logits
      const int buffer = norm & 1;
      named_barrier_sync(kMoments + buffer, kWithHelper);
      float sum = 0, squares = 0;
#pragma unroll
      for (int i = 0; i < kConsumers; ++i) {
        const float2 of_lane = shared.moments[buffer][i * kWarpSize + lane];
        sum += of_lane.x;
        squares += of_lane.y;
      }
      sum = warp_sum(sum);
      squares = warp_sum(squares);
      const float inverse = 1.0f / static_cast<float>(s.width), mean = sum * inverse;
      const float factor = rsqrtf(fmaxf(squares * inverse - mean * mean, 0.0f) + token.eps);
      if (lane == 0) shared.mean_factor[buffer] = {mean, factor};
      __syncwarp();
      named_barrier_arrive(norm == 2 * s.layers ? kLastMoments : kSums + (norm * 2 & 3), kWithHelper);
      if (buffer == 0 && norm < 2 * s.layers && part.head >= 0) {
        if (has_newest()) newest_key(norm / 2, lane);
        __syncwarp();
        named_barrier_arrive(kScores, kWithHelper);
      }
    }
  }

  __device__ __forceinline__ void newest_key(int layer, int lane) {
    const Message* const mine = messages + s.qkv_at + part.head * kHead + lane;
    const Message* const from[2] = {mine, mine + kWarpSize};
    const bool needed[2] = {true, true};
    Message message[2];
    wait_for(from, needed, message, tag + layer, state, Wanted::kQkv, layer);
    float* const qkv = shared.qkv_newest;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < kOfMessage; ++j) {
        qkv[(i * kWarpSize + lane) * kOfMessage + j] = __uint_as_float(message[i].value[j]);
      }
    }
    __syncwarp();
    const float score = warp_sum(qkv[lane] * qkv[kHead + lane] + qkv[32 + lane] * qkv[kHead + 32 + lane]);
    shared.newest[lane] = qkv[2 * kHead + lane];
    shared.newest[32 + lane] = qkv[2 * kHead + 32 + lane];
    if (lane == 0) shared.peaks[kConsumers] = {score, 1.0f};
  }
};

}  // namespace kf::KF_BACKEND::decode_step
