// Warpgroups that go different ways: who waits for whom, and who has how many registers. From compute capability 9.0
// on, setmaxnreg on 9.0 itself: nvcc -arch=sm_90a.
#pragma once

#include <cuda_runtime.h>
#include <step2/reduce.h>
#include <step2/shared_address.h>

#include <cstdint>

namespace kf::KF_BACKEND {

constexpr int kWarpgroupSize = 128;

// What all lanes of a warp have in common. The shuffle shows the compiler that they do, so that what is computed from
// it needs no register of each thread.
__device__ __forceinline__ int warp_uniform(int x) { return __shfl_sync(kFullWarp, x, 0); }

// The number of this warpgroup in its block.
__device__ __forceinline__ int warpgroup_of_block() {
  return warp_uniform(static_cast<int>(threadIdx.x / kWarpgroupSize));
}

// Whether this thread does what one thread does for its warpgroup. In warpgroup w it is lane 0 of warp w % 4, so that
// the leaders' further instructions are spread over the multiprocessor's four quarters.
__device__ __forceinline__ bool leads_warpgroup(int warpgroup) {
  return threadIdx.x % kWarpgroupSize == warpgroup % 4 * kWarpSize;
}

// One of a block's 16 barriers, for the warps that name it: `threads` in all, waiting or arriving. Barrier 0 is
// __syncthreads'. PTX: barrier.sync
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Counts as having come, and goes on. PTX: barrier.arrive
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// All warps of a warpgroup give registers back, or wait until as many are free and take them; a multiple of 8 from 24
// to 240. A launch gives each thread 65536 / threads, rounded down to a multiple of 8; who takes more than others have
// given waits for ever. PTX: setmaxnreg
template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  if constexpr (!kHas90a) return __trap();
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  if constexpr (!kHas90a) return __trap();
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace kf::KF_BACKEND
