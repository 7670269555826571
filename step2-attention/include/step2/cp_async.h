// Copies from global to shared memory that a thread starts and waits for later; no register holds the data on its way.
// PTX ISA, "Data Movement and Conversion Instructions: Non-bulk copy". From compute capability 8.0 on.
//
// Started copies are closed into groups; wait<N> waits until no more than the N newest groups are in flight. A wait
// covers the thread's own copies: a barrier must follow before other threads read them.
#pragma once

#include <cuda_runtime.h>
#include <step2/shared_address.h>

#include <cstdint>

namespace kf::KF_BACKEND {

// 16 bytes past the L1 cache; both addresses are multiples of 16. PTX: cp.async.cg
__device__ __forceinline__ void cp_async_16(void* to, const void* from) {
  if constexpr (!kHas80) return __trap();
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_address(to)), "l"(from) : "memory");
}

// The first `bytes` of 16 are read, and the rest becomes zero: for the edge of a matrix. With 0 nothing is read, but
// the address must still be a multiple of 16.
__device__ __forceinline__ void cp_async_16(void* to, const void* from, uint32_t bytes) {
  if constexpr (!kHas80) return __trap();
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_address(to)), "l"(from), "r"(bytes)
               : "memory");
}

// 4 or 8 bytes, through the L1 cache; both addresses are multiples of as many. PTX: cp.async.ca
template <int kBytes>
__device__ __forceinline__ void cp_async_small(void* to, const void* from) {
  static_assert(kBytes == 4 || kBytes == 8, "4 or 8 bytes");
  if constexpr (!kHas80) return __trap();
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(smem_address(to)), "l"(from), "n"(kBytes) : "memory");
}

// Closes a group. PTX: cp.async.commit_group
__device__ __forceinline__ void cp_async_commit() {
  if constexpr (!kHas80) return __trap();
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// PTX: cp.async.wait_group
template <int kNewest>
__device__ __forceinline__ void cp_async_wait() {
  if constexpr (!kHas80) return __trap();
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
}

}  // namespace kf::KF_BACKEND
