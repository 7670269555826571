// Programmatic dependent launch: a kernel that begins before the one in front of it in the stream has ended, and so has
// its launch and its own preparations behind it when it may go on. From compute capability 9.0 on; before, or compiled
// for less, a kernel begins when the one in front has ended, and the two instructions are nothing.
// CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization".
#pragma once

#include <cuda_runtime.h>
#include <kf/launch.h>
#include <step2/cluster.h>
#include <step2/shared_address.h>

namespace kf::KF_BACKEND {

// In the kernel in front: when all its blocks have said so, or ended, the next one's may begin.
// PTX: griddepcontrol.launch_dependents
__device__ __forceinline__ void launch_dependent_grids() {
  if constexpr (kHas90) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// In the kernel behind: the one in front has ended, and what it wrote is seen. Every block must wait, or the kernel
// after it might begin before the one in front of it has ended. PTX: griddepcontrol.wait
__device__ __forceinline__ void wait_on_dependent_grids() {
  if constexpr (kHas90) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Asks for 128 bytes to come to the L2 cache: no read, so the kernel in front may still write them. PTX: prefetch
__device__ __forceinline__ void prefetch_to_l2(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

// Launches a kernel that waits for the one in front; if `dependent`, it may begin when that one lets it. Behind one
// that does not it would begin a little later than an ordinary launch.
template <class... Params, class... Arguments>
void launch_dependent_if(bool dependent, void (*kernel)(Params...), dim3 grid, dim3 block, int64_t shared, void* stream,
                         Arguments... arguments) {
  if (dependent) {
    cudaFuncAttributes compiled;  // for less than 9.0 it does not wait, on whichever GPU
    check(cudaFuncGetAttributes(&compiled, kernel), "cudaFuncGetAttributes");
    dependent = compiled.ptxVersion >= 90;
  }
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = as_stream(stream);
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, arguments...), "cudaLaunchKernelEx");
}

template <class... Params, class... Arguments>
void launch_dependent(void (*kernel)(Params...), dim3 grid, dim3 block, int64_t shared, void* stream,
                      Arguments... arguments) {
  launch_dependent_if(true, kernel, grid, block, shared, stream, arguments...);
}

// The same for clusters of `cluster` neighbours in x.
template <class... Params, class... Arguments>
void launch_dependent_in_clusters(void (*kernel)(Params...), int64_t cluster, dim3 grid, int block, int64_t shared,
                                  void* stream, Arguments... arguments) {
  with_clusters(kernel, cluster, grid, block, shared, [&](auto& config) {
    cudaLaunchAttribute attributes[2] = {config.attrs[0]};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.attrs = attributes;
    config.numAttrs = 2;
    config.stream = as_stream(stream);
    check(cudaLaunchKernelEx(&config, kernel, arguments...), "cudaLaunchKernelEx");
  });
}

}  // namespace kf::KF_BACKEND
