// What every launcher needs: the stream, the grid's arithmetic, and the check after the launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>

namespace kf::KF_BACKEND {

inline cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Turns a CUDA error into a C++ exception, which torch turns into a Python one.
inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or whoever asks after the next launch would be told of it again
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// How many multiprocessors the current device has.
inline int64_t multiprocessors() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return count;
}

// Of the current device: 80 for 8.0, 90 for 9.0.
inline int compute_capability() {
  int device = 0, major = 0, minor = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
  return 10 * major + minor;
}

// The most shared memory that a block may have on the current device: 64 KB on Turing, 96 on Volta, 99 or 163 on
// Ampere, 227 on Hopper.
inline int64_t shared_memory_limit() {
  int device = 0;
  int bytes = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
  return bytes;
}

// For a rung's `can_implement`: why a block cannot keep `what`, so many bytes, in shared memory; "" if it can.
inline std::string too_much_shared_memory(int64_t bytes, const std::string& what) {
  const int64_t limit = shared_memory_limit();
  if (bytes <= limit) return "";
  return "keeps " + what + " in shared memory: " + std::to_string(bytes) + " bytes, of which this device has " +
         std::to_string(limit) + " a block";
}

// A launch may give a block more than 48 KB of shared memory only after this. What a kernel may have only grows:
// another thread may be about to launch it with more than this one wants.
template <class Kernel>
void allow_shared(Kernel* kernel, int64_t bytes) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> held(one_at_a_time);
  cudaFuncAttributes now;
  check(cudaFuncGetAttributes(&now, kernel), "cudaFuncGetAttributes");
  if (now.maxDynamicSharedSizeBytes >= bytes) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        "cudaFuncSetAttribute");
}

// Right after <<<>>>: finds a launch that CUDA refused (too many threads, too much shared memory, no code for this
// GPU). Errors inside the kernel appear at the next synchronisation, not here.
inline void check_launch() { check(cudaGetLastError(), "kernel launch"); }

}  // namespace kf::KF_BACKEND
