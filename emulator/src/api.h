// What the runtime API's calls have in common.
#pragma once

#include "runtime.h"

#include "kf_simt/runtime_api.h"

namespace kf::simt {

constexpr std::size_t kPitch = 512;  // cudaMallocPitch gives multiples of this

std::size_t memory_total();

// Remembers the error, if it is one, and returns it; after a fault in a kernel, that one.
cudaError_t report(cudaError_t error);

// While one lives, this OS thread works for the device, in a call of CUDA's.
class RuntimeCall : Pinned {
 public:
  explicit RuntimeCall(bool synchronises = false);
  ~RuntimeCall();
  void open(const void* memory, std::size_t bytes);

 private:
  const bool synchronises_;
};

}  // namespace kf::simt
