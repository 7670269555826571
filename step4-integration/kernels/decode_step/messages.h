// Messages between blocks: 16 bytes in global memory, four values and a tag that says which layer they are of.
//
// A load or store of 16 bytes is one access, so who sees the tag sees the values: no flag beside the data, no fence, no
// second read. A value keeps 24 of its 32 bits, 16 digits of the 24: what is sent would be rounded to fewer elsewhere.
#pragma once

#include <step1/vector.h>
#include <step2/shared_address.h>

#include <cstdint>

#include "schedule.h"

namespace kf::KF_BACKEND::decode_step {

using kf::decode_step::Kind;
using Message = Vector<uint32_t, 4>;  // the last one is the tag

// PTX: st.relaxed.gpu.b128
__device__ __forceinline__ void store_message(Message* to, const Message& m) {
  const uint64_t low = m.element[0] | uint64_t{m.element[1]} << 32;
  const uint64_t high = m.element[2] | uint64_t{m.element[3]} << 32;
  if constexpr (!kHas90) return __trap();
  asm volatile("{ .reg .b128 m; mov.b128 m, {%1, %2}; st.relaxed.gpu.global.b128 [%0], m; }" ::"l"(to), "l"(low),
               "l"(high)
               : "memory");
}

// PTX: ld.relaxed.gpu.b128
__device__ __forceinline__ Message load_message(const Message* from) {
  uint64_t low = 0, high = 0;
  if constexpr (!kHas90) return __trap(), Message{};
  asm volatile("{ .reg .b128 m; ld.relaxed.gpu.global.b128 m, [%2]; mov.b128 {%0, %1}, m; }"
               : "=l"(low), "=l"(high)
               : "l"(from)
               : "memory");
  return {{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
           static_cast<uint32_t>(high >> 32)}};
}

// A NaN stays one: rounded, its bits would run over.
__device__ __forceinline__ uint32_t upper_24_bits(float value) {
  const uint32_t bits = __float_as_uint(value);
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffff00u : (bits + 0x80u) & 0xffffff00u;
}

__device__ __forceinline__ Message message_of(const float (&value)[4], uint32_t tag) {
  const uint32_t last = upper_24_bits(value[3]);
  return {{upper_24_bits(value[0]) | last >> 24, upper_24_bits(value[1]) | (last >> 16 & 0xffu),
           upper_24_bits(value[2]) | (last >> 8 & 0xffu), tag}};
}

__device__ __forceinline__ void values_of(const Message& m, float (&value)[4]) {
#pragma unroll
  for (int i = 0; i < 3; ++i) value[i] = __uint_as_float(m.element[i] & 0xffffff00u);
  value[3] = __uint_as_float((m.element[0] & 0xffu) << 24 | (m.element[1] & 0xffu) << 16 | (m.element[2] & 0xffu) << 8);
}

// ---- waiting, with an end ----

// What went wrong first, in the first message's place: what was waited for, in which layer, by which block.
struct Failure {
  uint32_t kind, layer, block, unused;
};

constexpr uint32_t kMostPolls = 1u << 24;  // some ten seconds
constexpr uint32_t kPollsBetweenLooks = 1024;

// After so many polls: whether to wait no longer, and for whom that is news.
__device__ __noinline__ bool give_up(Failure* failure, uint32_t polls, uint32_t layer, Kind kind) {
  const uint32_t mine = static_cast<uint32_t>(kind) + 1;
  if (polls >= kMostPolls && atomicCAS(&failure->kind, 0u, mine) == 0u) {
    atomicExch(&failure->layer, layer);
    atomicExch(&failure->block, blockIdx.x);
  }
  return atomicAdd(&failure->kind, 0u) != 0;
}

struct Waiting {
  Failure* failure;
  bool gave_up = false;

  // Until all messages that a warp's lanes need have the tag: the warp goes on together. Those that are not, or that
  // nobody sends in time, come as NaN.
  template <int N>
  __device__ __forceinline__ void wait(const Message* const (&from)[N], const bool (&needed)[N], Message (&message)[N],
                                       uint32_t tag, Kind kind) {
#pragma unroll
    for (int i = 0; i < N; ++i) message[i] = {{~0u, ~0u, ~0u, needed[i] && !gave_up ? ~tag : tag}};
    for (uint32_t polls = 1;; ++polls) {
      bool all = true;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (message[i].element[3] != tag) message[i] = load_message(from[i]);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) all = all && message[i].element[3] == tag;
      if (__all_sync(0xffffffffu, all)) return;
      const bool looks = polls % kPollsBetweenLooks == 0;
      if (looks && __any_sync(0xffffffffu, give_up(failure, polls, tag - 1, kind))) break;
    }
    gave_up = true;
#pragma unroll
    for (int i = 0; i < N; ++i) message[i] = {{~0u, ~0u, ~0u, tag}};
  }
};

}  // namespace kf::KF_BACKEND::decode_step
