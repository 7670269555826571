// TMA: one thread copies a whole box of a tensor between global and shared memory. From compute capability 9.0 on.
// PTX ISA, "cp.async.bulk.tensor" and "cp.async.bulk".
//
// tensor_map.h makes the map, on the host; a kernel takes it as `const __grid_constant__ CUtensorMap map`. Coordinates
// count elements, the innermost dimension first, and may lie outside of the tensor: what is read there is zero (or NaN,
// as the map says), what is written there is dropped. The box lies in shared memory row after row, at a multiple of 128
// (with a swizzle of 128 bytes, 1024), its 16-byte chunks moved as the swizzle says: see swizzled_offset.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <step2/shared_address.h>

#include <cstdint>

namespace kf::KF_BACKEND {

// How many bytes a row of a swizzled box has; the 16-byte chunks of a row are exchanged, in another order for each row,
// so that a column of chunks lies in all banks.
enum class Swizzle { kNone, k32, k64, k128 };

// Where byte `offset` of a box lies, counted from its beginning, which must be a multiple of 1024 bytes (512, 256).
__host__ __device__ constexpr uint32_t swizzled_offset(uint32_t offset, Swizzle swizzle) {
  const uint32_t mask = swizzle == Swizzle::k128 ? 7 : swizzle == Swizzle::k64 ? 3 : swizzle == Swizzle::k32 ? 1 : 0;
  return offset ^ ((offset >> 7 & mask) << 4);
}

// Fetches the map itself. PTX: prefetch.tensormap
__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap* map) {
  if constexpr (!kHas90) return __trap();
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads. x, y, … are the element at which the box begins; x must be a multiple of 16 bytes, and a box may lie over the
// tensor's edges: what is outside is 0, or NaN if the map says so. The barrier counts the bytes of the whole box, also
// of what lies outside of the tensor; announce them with mbarrier_arrive_expect_tx. PTX:
// cp.async.bulk.tensor.Nd.shared::cluster.global.mbarrier
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int32_t x) {
  if constexpr (!kHas90) return __trap();
  asm volatile(
      "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3}], [%2];" ::"r"(
          smem_address(to)),
      "l"(map), "r"(smem_address(barrier)), "r"(x)
      : "memory");
}

__device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int32_t x, int32_t y) {
  if constexpr (!kHas90) return __trap();
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4}], [%2];" ::"r"(
          smem_address(to)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y)
      : "memory");
}

__device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int32_t x, int32_t y,
                                         int32_t z) {
  if constexpr (!kHas90) return __trap();
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5}], [%2];" ::"r"(
          smem_address(to)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int32_t x, int32_t y,
                                         int32_t z, int32_t u) {
  if constexpr (!kHas90) return __trap();
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6}], [%2];" ::
          "r"(smem_address(to)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(u)
      : "memory");
}

__device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int32_t x, int32_t y,
                                         int32_t z, int32_t u, int32_t v) {
  if constexpr (!kHas90) return __trap();
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6,%7}], "
      "[%2];" ::"r"(smem_address(to)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v)
      : "memory");
}

// Asks for the box to come to the L2 cache, and waits for nothing. What is there when it is read counts, so it may be
// asked for before it is written. PTX: cp.async.bulk.prefetch.tensor
__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map, int32_t x, int32_t y) {
  if constexpr (!kHas90) return __trap();
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(x), "r"(y) : "memory");
}

// The same box into the same place of several blocks of the cluster: bit r of `blocks` stands for rank r. Each of them
// gets the bytes counted by its own barrier. Fast on 9.0 itself only: nvcc -arch=sm_90a. PTX: .multicast::cluster
__device__ __forceinline__ void tma_load_multicast(void* to, const CUtensorMap* map, uint64_t* barrier, uint16_t blocks,
                                                   int32_t x, int32_t y) {
  if constexpr (!kHas90a) return __trap();
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%4,%5}], [%2], %3;" ::"r"(smem_address(to)),
      "l"(map), "r"(smem_address(barrier)), "h"(blocks), "r"(x), "r"(y)
      : "memory");
}

// Stores. No coordinate may be below 0; what lies beyond the tensor is left out. What threads wrote to shared memory
// before must be shown to TMA by tma_store_fence, by each thread that wrote, and then a barrier. Then one thread
// stores, closes the group and waits. PTX: cp.async.bulk.tensor.Nd.global.shared::cta
__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* from, int32_t x) {
  if constexpr (!kHas90) return __trap();
  asm volatile("cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%0, {%2}], [%1];" ::"l"(map),
               "r"(smem_address(from)), "r"(x)
               : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* from, int32_t x, int32_t y) {
  if constexpr (!kHas90) return __trap();
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2,%3}], [%1];" ::"l"(map),
               "r"(smem_address(from)), "r"(x), "r"(y)
               : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* from, int32_t x, int32_t y, int32_t z) {
  if constexpr (!kHas90) return __trap();
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2,%3,%4}], [%1];" ::"l"(map),
               "r"(smem_address(from)), "r"(x), "r"(y), "r"(z)
               : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* from, int32_t x, int32_t y, int32_t z,
                                          int32_t u) {
  if constexpr (!kHas90) return __trap();
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2,%3,%4,%5}], [%1];" ::"l"(map),
               "r"(smem_address(from)), "r"(x), "r"(y), "r"(z), "r"(u)
               : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* from, int32_t x, int32_t y, int32_t z,
                                          int32_t u, int32_t v) {
  if constexpr (!kHas90) return __trap();
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2,%3,%4,%5,%6}], [%1];" ::"l"(map),
               "r"(smem_address(from)), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v)
               : "memory");
}

// Adds the box to what the tensor holds, element by element, each addition atomic. PTX: cp.reduce.async.bulk.tensor
__device__ __forceinline__ void tma_add(const CUtensorMap* map, const void* from, int32_t x, int32_t y) {
  if constexpr (!kHas90) return __trap();
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%2,%3}], [%1];" ::"l"(map),
               "r"(smem_address(from)), "r"(x), "r"(y)
               : "memory");
}

// Without a map: `bytes` bytes in one piece; the addresses and `bytes` are multiples of 16. PTX: cp.async.bulk
__device__ __forceinline__ void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  if constexpr (!kHas90) return __trap();
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_address(to)),
      "l"(from), "r"(bytes), "r"(smem_address(barrier))
      : "memory");
}

// That what is read with it may leave the L2 cache before anything else: it is not read again. A stream's rate grows,
// and what others have there stays. PTX: createpolicy
__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy = 0;
  if constexpr (!kHas90) return __trap(), policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier,
                                          uint64_t policy) {
  if constexpr (!kHas90) return __trap();
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(smem_address(to)),
      "l"(from), "r"(bytes), "r"(smem_address(barrier)), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void bulk_store(void* to, const void* from, uint32_t bytes) {
  if constexpr (!kHas90) return __trap();
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(smem_address(from)),
               "r"(bytes)
               : "memory");
}

// The same, but adds floats to those that are there, each addition atomic. PTX: cp.reduce.async.bulk
__device__ __forceinline__ void bulk_add(float* to, const float* from, uint32_t bytes) {
  if constexpr (!kHas90) return __trap();
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(smem_address(from)), "r"(bytes)
               : "memory");
}

// PTX: fence.proxy.async
__device__ __forceinline__ void tma_store_fence() {
  if constexpr (!kHas90) return __trap();
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for global memory: orders what this thread knows to be there before its bulk copies that follow.
__device__ __forceinline__ void tma_global_fence() {
  if constexpr (!kHas90) return __trap();
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Closes a group of stores. PTX: cp.async.bulk.commit_group
__device__ __forceinline__ void tma_store_commit() {
  if constexpr (!kHas90) return __trap();
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until no more than the kNewest newest groups still read shared memory, which may then be used again. A thread
// does this before it ends. PTX: cp.async.bulk.wait_group.read
template <int kNewest>
__device__ __forceinline__ void tma_store_wait_read() {
  if constexpr (!kHas90) return __trap();
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kNewest) : "memory");
}

// Waits until they have written, too. PTX: cp.async.bulk.wait_group
template <int kNewest>
__device__ __forceinline__ void tma_store_wait() {
  if constexpr (!kHas90) return __trap();
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kNewest) : "memory");
}

}  // namespace kf::KF_BACKEND
