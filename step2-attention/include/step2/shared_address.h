// Addresses in shared memory, as PTX names them: 32 bits, counted from where the shared memory begins.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kf::KF_BACKEND {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace kf::KF_BACKEND
