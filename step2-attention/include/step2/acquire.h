// Counters in global memory by which blocks tell each other what is there. PTX ISA, "Memory Consistency Model".
#pragma once

#include <cuda_runtime.h>

namespace kf::KF_BACKEND {

// The counter, read so that what was done before it was set is seen as well. PTX: ld.acquire
__device__ __forceinline__ unsigned load_acquire(const unsigned* address) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Until it has this value.
__device__ __forceinline__ void wait_for_counter(const unsigned* address, unsigned value) {
  while (load_acquire(address) != value) __nanosleep(20);
}

// Sets it, after all that this thread knows to be in memory. PTX: st.release
__device__ __forceinline__ void store_release(unsigned* address, unsigned value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Adds to it, likewise. PTX: red.release
__device__ __forceinline__ void add_release(unsigned* address, unsigned value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

}  // namespace kf::KF_BACKEND
