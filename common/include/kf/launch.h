// What every launcher needs: the stream, the grid's arithmetic, and the check after the launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace kf::KF_BACKEND {

inline cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Turns a CUDA error into a C++ exception, which torch turns into a Python one.
inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
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

// A launch may give a block more than 48 KB of shared memory only after this.
template <class Kernel>
void allow_shared(Kernel* kernel, int bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "cudaFuncSetAttribute");
}

// Right after <<<>>>: finds a launch that CUDA refused (too many threads, too much shared memory, no code for this
// GPU). Errors inside the kernel appear at the next synchronisation, not here.
inline void check_launch() { check(cudaGetLastError(), "kernel launch"); }

}  // namespace kf::KF_BACKEND
