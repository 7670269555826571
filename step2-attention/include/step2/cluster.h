// Clusters: blocks that run at the same time and reach into each other's shared memory. From compute capability 9.0 on.
// PTX ISA, "Cluster of Cooperative Thread Arrays". A kernel has them by __cluster_dims__(x, y, z), which is an error
// where the file is compiled for older GPUs as well, or by an attribute of the launch.
#pragma once

#include <cuda_runtime.h>
#include <kf/launch.h>
#include <step2/shared_address.h>

#include <cstdint>
#include <string>

namespace kf::KF_BACKEND {

// The rank of this block in its cluster, and how many there are. PTX: %cluster_ctarank, %cluster_nctarank
__device__ __forceinline__ uint32_t cluster_rank_of_block() {
  uint32_t rank = 0;
  if constexpr (!kHas90) return __trap(), rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ uint32_t cluster_blocks() {
  uint32_t blocks = 1;
  if constexpr (!kHas90) return __trap(), blocks;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
}

// The barrier of all threads of the cluster, in two halves. What a thread did before it arrives is seen by those that
// have waited. PTX: barrier.cluster
__device__ __forceinline__ void cluster_barrier_arrive() {
  if constexpr (!kHas90) return __trap();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// The same, but what the thread did before need not be seen: a fence of global memory less.
__device__ __forceinline__ void cluster_barrier_arrive_relaxed() {
  if constexpr (!kHas90) return __trap();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_barrier_wait() {
  if constexpr (!kHas90) return __trap();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_sync() {
  cluster_barrier_arrive();
  cluster_barrier_wait();
}

// The address, in the shared memory of the block of this rank, of what `pointer` is here. PTX: mapa
__device__ __forceinline__ uint32_t remote_address(const void* pointer, uint32_t rank) {
  uint32_t address = 0;
  if constexpr (!kHas90) return __trap(), address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem_address(pointer)), "r"(rank));
  return address;
}

// A number in another block's shared memory. No block may be reached into before it has begun or after it has ended: a
// cluster_sync on either side.
// PTX: ld.shared::cluster, st.shared::cluster
__device__ __forceinline__ float load_remote(uint32_t address) {
  float value = 0;
  if constexpr (!kHas90) return __trap(), value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}
// Four neighbours at a multiple of 16 bytes.
__device__ __forceinline__ float4 load_remote_4(uint32_t address) {
  float4 v = {};
  if constexpr (!kHas90) return __trap(), v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_remote(uint32_t address, float value) {
  if constexpr (!kHas90) return __trap();
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ void store_remote(uint32_t address, double value) {
  if constexpr (!kHas90) return __trap();
  asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(address), "d"(value) : "memory");
}

// Two neighbours in memory.
template <class C>
struct alignas(2 * sizeof(C)) Pair {
  C first, second;
};

// A store of two at once that an mbarrier of that block counts, 8 or 16 bytes. PTX: st.async
__device__ __forceinline__ void store_remote_async(uint32_t address, Pair<float> values, uint32_t barrier) {
  if constexpr (!kHas90) return __trap();
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
               "f"(values.first), "f"(values.second), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void store_remote_async(uint32_t address, Pair<double> values, uint32_t barrier) {
  if constexpr (!kHas90) return __trap();
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f64 [%0], {%1, %2}, [%3];" ::"r"(address),
               "d"(values.first), "d"(values.second), "r"(barrier)
               : "memory");
}

// The same for 16 bytes of anything.
__device__ __forceinline__ void store_remote_async(uint32_t address, const uint32_t (&values)[4], uint32_t barrier) {
  if constexpr (!kHas90) return __trap();
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3]), "r"(barrier)
      : "memory");
}

// Why rows of so many blocks each cannot be launched; empty if they can.
inline std::string can_implement_blocks(int64_t rows, int64_t blocks) {
  if (rows * blocks <= INT32_MAX) return "";
  return "takes at most 2147483647 blocks, got " + std::to_string(rows) + " rows of " + std::to_string(blocks);
}

// Calls f with the configuration of a launch in clusters of `cluster` neighbours in x.
template <class... Params, class F>
void with_clusters(void (*kernel)(Params...), int64_t cluster, dim3 grid, int block, int64_t shared, F&& f) {
  // For more than 8 not every GPU with clusters has room; CUDA wants to hear that this is known.
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "cudaFuncSetAttribute");
  allow_shared(kernel, shared);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = shared;
  config.attrs = &attribute;
  config.numAttrs = 1;
  f(config);
}

// How many clusters of so many blocks the current device runs at once. Not as many as its multiprocessors hold: those
// of a cluster are neighbours.
template <class... Params>
int64_t clusters_at_once(void (*kernel)(Params...), int64_t cluster, int block, int64_t shared) {
  int count = 0;
  with_clusters(kernel, cluster, dim3(static_cast<unsigned>(cluster)), block, shared, [&](auto& config) {
    check(cudaOccupancyMaxActiveClusters(&count, kernel, &config), "cudaOccupancyMaxActiveClusters");
  });
  return count;
}

template <class... Params, class... Arguments>
void launch_in_clusters(void (*kernel)(Params...), int64_t cluster, dim3 grid, int block, int64_t shared, void* stream,
                        Arguments... arguments) {
  with_clusters(kernel, cluster, grid, block, shared, [&](auto& config) {
    config.stream = as_stream(stream);
    check(cudaLaunchKernelEx(&config, kernel, arguments...), "cudaLaunchKernelEx");
  });
}

}  // namespace kf::KF_BACKEND
