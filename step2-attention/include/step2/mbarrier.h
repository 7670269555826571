// Barriers in shared memory that count arrivals of threads and bytes of asynchronous copies. PTX ISA, "mbarrier".
//
// A barrier goes through phases. A phase is complete when `count` arrivals have come and all bytes that were announced
// have been copied; the next one begins at once. A thread waits for a phase by its parity: 0 for the first, 1 for the
// second, 0 for the third. Waiting for parity 1 of a fresh barrier returns at once, which lets a producer begin with
// empty buffers. A barrier is 8 bytes at a multiple of 8.
#pragma once

#include <cuda_runtime.h>
#include <step2/shared_address.h>

#include <cstdint>

namespace kf::KF_BACKEND {

// One thread does this; then mbarrier_init_fence, and a barrier of the block (or cluster), before anyone uses it.
// PTX: mbarrier.init
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t count) {
  if constexpr (!kHas80) return __trap();
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(count) : "memory");
}

// Shows initialised barriers to copies and to the other blocks of the cluster. PTX: fence.mbarrier_init
__device__ __forceinline__ void mbarrier_init_fence() {
  if constexpr (!kHas90) return __trap();
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Before the memory is used for something else. PTX: mbarrier.inval
__device__ __forceinline__ void mbarrier_invalidate(uint64_t* barrier) {
  if constexpr (!kHas80) return __trap();
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// PTX: mbarrier.arrive
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  if constexpr (!kHas80) return __trap();
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(smem_address(barrier))
               : "memory");
}

// Arrives, and announces the bytes that copies will bring in this phase. PTX: mbarrier.arrive.expect_tx
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  if constexpr (!kHas90) return __trap();
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
               : "memory");
}

// Arrives at the same barrier of another block of the cluster. PTX: mapa, mbarrier.arrive.shared::cluster
__device__ __forceinline__ void mbarrier_arrive_remote(uint64_t* barrier, uint32_t rank) {
  if constexpr (!kHas90) return __trap();
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; "
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote]; }" ::"r"(smem_address(barrier)),
      "r"(rank)
      : "memory");
}

// The same where this block has only read what the other one will overwrite: none of its writes need be seen there, so
// there is no fence of global memory, which takes a microsecond. PTX: mapa, mbarrier.arrive.shared::cluster
__device__ __forceinline__ void mbarrier_arrive_remote_cta(uint64_t* barrier, uint32_t rank) {
  if constexpr (!kHas90) return __trap();
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; "
      "mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(smem_address(barrier)),
      "r"(rank)
      : "memory");
}

// Arrives when all copies of cp_async that this thread has started are there; the arrival is one of `count`.
// PTX: cp.async.mbarrier.arrive.noinc
__device__ __forceinline__ void mbarrier_arrive_after_copies(uint64_t* barrier) {
  if constexpr (!kHas80) return __trap();
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// Whether the phase of this parity is complete; the hardware may wait a while first. PTX: mbarrier.try_wait.parity
__device__ __forceinline__ bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t complete = 0;
  if constexpr (!kHas90) return __trap(), false;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(complete)
               : "r"(smem_address(barrier)), "r"(parity)
               : "memory");
  return complete != 0;
}

// The same, but at once: try_wait may have the thread sleep for a while.
__device__ __forceinline__ bool mbarrier_test_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t complete = 0;
  if constexpr (!kHas90) return __trap(), false;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(complete)
               : "r"(smem_address(barrier)), "r"(parity)
               : "memory");
  return complete != 0;
}

__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

// The same by a whole warp, which goes on together. After mbarrier_wait the compiler does not know whether lanes have
// met again, and may keep what they have in common, as wgmma's descriptors, in registers of each.
__device__ __forceinline__ void mbarrier_wait_warp(uint64_t* barrier, uint32_t parity) {
  while (!__all_sync(0xffffffffu, mbarrier_try_wait(barrier, parity))) {
  }
}

// Both where blocks of a cluster arrive: what they did before is seen afterwards.
__device__ __forceinline__ bool mbarrier_try_wait_cluster(uint64_t* barrier, uint32_t parity) {
  uint32_t complete = 0;
  if constexpr (!kHas90) return __trap(), false;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(complete)
      : "r"(smem_address(barrier)), "r"(parity)
      : "memory");
  return complete != 0;
}

__device__ __forceinline__ void mbarrier_wait_cluster(uint64_t* barrier, uint32_t parity) {
  while (!mbarrier_try_wait_cluster(barrier, parity)) {
  }
}

}  // namespace kf::KF_BACKEND
