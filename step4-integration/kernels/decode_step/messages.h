// Messages between blocks: 16 bytes in global memory, 12 of values and a tag, which says of which launch and layer they
// are.
//
// A load or store of 16 bytes is one access, so who sees the tag sees the values: no flag beside the data, no fence, no
// second read. Every wait has an end: who waits too long says so in the state, and all others give up, too.
#pragma once

#include <kf/numeric.h>
#include <step2/mbarrier.h>
#include <step2/reduce.h>
#include <step2/shared_address.h>

#include <cstdint>

#include "packed.h"

namespace kf::KF_BACKEND::decode_step {

using kf::decode_step::State;
using kf::decode_step::Wanted;

struct Message {
  uint32_t value[3], tag;
};

// PTX: st.relaxed.gpu.b128
__device__ __forceinline__ void store_message(Message* to, uint32_t a, uint32_t b, uint32_t c, uint32_t tag) {
  const uint64_t low = a | uint64_t{b} << 32, high = c | uint64_t{tag} << 32;
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
  return {{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high)},
          static_cast<uint32_t>(high >> 32)};
}

// ---- waiting, with an end ----

constexpr uint32_t kMostPolls = 1u << 21, kPollsBetweenLooks = 1024;

// After so many polls: whether to wait no longer.
__device__ __forceinline__ bool give_up(State* state, uint32_t polls, Wanted wanted, int where) {
  if (polls >= kMostPolls && atomicCAS(&state->wanted, 0u, static_cast<uint32_t>(wanted)) == 0u) {
    atomicExch(&state->where, static_cast<uint32_t>(where));
    atomicExch(&state->block, blockIdx.x);
  }
  return *const_cast<const volatile uint32_t*>(&state->wanted) != 0;
}

// Until all messages that a warp's lanes need have the tag: the warp goes on together. What nobody sends in time comes
// as NaN.
template <int N>
__device__ __forceinline__ void wait_for(const Message* const (&from)[N], const bool (&needed)[N],
                                         Message (&message)[N], uint32_t tag, State* state, Wanted wanted, int where) {
#pragma unroll
  for (int i = 0; i < N; ++i) message[i] = {{0, 0, 0}, needed[i] ? ~tag : tag};
  for (uint32_t polls = 1;; ++polls) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (message[i].tag != tag) message[i] = load_message(from[i]);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) all = all && message[i].tag == tag;
    if (__all_sync(kFullWarp, all)) return;
    if (polls % kPollsBetweenLooks == 0 && __any_sync(kFullWarp, give_up(state, polls, wanted, where))) break;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) message[i] = {{0x7fc07fc0u, 0x7fc07fc0u, 0x7fc07fc0u}, tag};
}

// By a warp, or one lane of it (kWarp false). False: it never comes. It acquires for the block, also where blocks of
// the cluster store: for the cluster each wait would empty the multiprocessor's L1 cache, and shared memory is not in
// it.
template <bool kWarp>
__device__ __forceinline__ bool wait_for_phase(uint64_t* barrier, uint32_t parity, State* state, Wanted wanted,
                                               int where) {
  for (uint32_t polls = 1;; ++polls) {
    const bool complete = mbarrier_try_wait(barrier, parity);
    if (kWarp ? __all_sync(kFullWarp, complete) : complete) return true;
    if (__builtin_expect(polls % kPollsBetweenLooks != 0, 1)) continue;
    const bool ends = give_up(state, polls, wanted, where);
    if (kWarp ? __any_sync(kFullWarp, ends) : ends) return false;
  }
}

}  // namespace kf::KF_BACKEND::decode_step
