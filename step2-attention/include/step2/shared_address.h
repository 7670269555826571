// What the wrappers of PTX share: addresses in shared memory as it names them, and which instructions there are.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kf::KF_BACKEND {

// 32 bits, counted from where the shared memory begins.
__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Whether the GPU that this is compiled for has what came with a compute capability; kHas90a: with 9.0 itself. Where it
// has not, a wrapper is a trap. The emulation has all.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kHas90a = true;
#else
constexpr bool kHas90a = false;
#endif
#ifdef __CUDA_ARCH__
constexpr bool kHas75 = __CUDA_ARCH__ >= 750, kHas80 = __CUDA_ARCH__ >= 800, kHas90 = __CUDA_ARCH__ >= 900;
#else
constexpr bool kHas75 = true, kHas80 = true, kHas90 = true;
#endif

}  // namespace kf::KF_BACKEND
