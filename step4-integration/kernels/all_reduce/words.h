// Words that say themselves that they are there: between GPUs, past the L1 cache, with no flag beside them. PTX ISA,
// "Memory Consistency Model": the scope .sys is all devices; a word arrives whole, words in any order.
#pragma once

#include <kf/numeric.h>

#include <cstdint>
#include <cstdio>

namespace kf::KF_BACKEND::all_reduce {

constexpr uint32_t kNothing = 0xffffffffu;  // what stands where nothing has come: a NaN that no number is sent as
constexpr int kSlots = 3;                   // see v4_push.cu

__device__ __forceinline__ void load_words(const uint32_t* from, uint32_t (&w)[4]) {
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "l"(from)
               : "memory");
}
__device__ __forceinline__ void load_words(const uint32_t* from, uint32_t (&w)[1]) {
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(w[0]) : "l"(from) : "memory");
}
__device__ __forceinline__ void store_words(uint32_t* to, const uint32_t (&w)[4]) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]),
               "r"(w[3])
               : "memory");
}
__device__ __forceinline__ void store_words(uint32_t* to, const uint32_t (&w)[1]) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(w[0]) : "memory");
}

template <int kWords>
__device__ __forceinline__ bool none_is_nothing(const uint32_t (&words)[kWords]) {
  bool none = true;
#pragma unroll
  for (int w = 0; w < kWords; ++w) none = none && words[w] != kNothing;
  return none;
}

__device__ __forceinline__ int64_t nanoseconds() {
  int64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Of a worker that waits: its number, how long at most, and where it notes that it has said so.
struct Waiting {
  const char* op;
  int rank;
  int64_t patience_ns;
  uint32_t* told;
};

// Asks ready() until it says so. Not for ever: a worker that has ended sends nothing any more. late() says for whom.
template <class Ready, class Late>
__device__ __forceinline__ void wait_for(const Waiting& who, Ready ready, Late late) {
  int64_t begin = 0;
  for (int asked = 0; !ready(); ++asked) {
    if (asked % 256 != 0) continue;
    const int64_t now = nanoseconds();
    if (asked == 0) begin = now;
    if (now - begin > who.patience_ns) {
      if (atomicExch(who.told, 1u) == 0) {
        printf("%s: worker %d has waited %.1f s for worker %d\n", who.op, who.rank,
               1e-9 * static_cast<double>(now - begin), late());
      } else {
        __nanosleep(1000000);  // whoever tells it is not to be trapped before
      }
      __trap();
    }
  }
}

}  // namespace kf::KF_BACKEND::all_reduce
