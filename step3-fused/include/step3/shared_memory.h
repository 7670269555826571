// More than 48 KB of shared memory a block: a kernel must ask for it, and each GPU has its limit.
#pragma once

#include <kf/launch.h>

#include <string>

namespace kf::KF_BACKEND {

// The most that a block may have on this device: 64 KB on Turing, 96 on Volta, 99 or 163 on Ampere, 227 on Hopper.
inline int64_t shared_memory_limit() {
  int device = 0;
  int bytes = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
  return bytes;
}

template <class Kernel>
void allow_shared_memory(Kernel* kernel, int64_t bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        "cudaFuncSetAttribute");
}

// For `supports`: why a block cannot have `bytes`, or "".
inline std::string too_much_shared_memory(int64_t bytes, const std::string& what) {
  const int64_t limit = shared_memory_limit();
  if (bytes <= limit) return "";
  return "keeps " + what + " in shared memory: " + std::to_string(bytes) + " bytes, of which this device has " +
         std::to_string(limit) + " a block";
}

}  // namespace kf::KF_BACKEND
