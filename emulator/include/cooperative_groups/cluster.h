// Cooperative groups: the cluster. Included by cooperative_groups.h.
#pragma once

#include "cuda_runtime.h"

namespace kf::simt {
namespace cooperative_groups {

class cluster_group {
 public:
  struct arrival_token {};

  static void sync(CallSite site = CallSite::here()) {
    cluster_arrive(site);
    cluster_wait(site);
  }
  static arrival_token barrier_arrive(CallSite site = CallSite::here()) {
    cluster_arrive(site);
    return {};
  }
  static void barrier_wait(CallSite site = CallSite::here()) { cluster_wait(site); }
  static void barrier_wait(arrival_token&&, CallSite site = CallSite::here()) { cluster_wait(site); }

  // The block whose shared memory holds this address.
  static unsigned query_shared_rank(const void* address) {
    const unsigned block = kf_shared_address(address) >> 24;
    return block == 0 ? kf_cluster_rank() : block - 1;
  }
  // The same place in the shared memory of another block.
  template <class T>
  static T* map_shared_rank(T* address, int rank) {
    return static_cast<T*>(::kf::simt::map_shared_rank(address, static_cast<unsigned>(rank)));
  }

  static dim3 block_index() { return kf_cluster_block_index(); }
  static unsigned block_rank() { return kf_cluster_rank(); }
  static dim3 dim_blocks() { return kf_cluster_dim(); }
  static unsigned num_blocks() { return kf_cluster_size(); }
  static dim3 thread_index() {
    const uint3 block = kf_cluster_block_index();
    return {block.x * blockDim.x + threadIdx.x, block.y * blockDim.y + threadIdx.y, block.z * blockDim.z + threadIdx.z};
  }
  static unsigned thread_rank() {
    const unsigned in_block = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    return kf_cluster_rank() * threads_of_block() + in_block;
  }
  static dim3 dim_threads() {
    const dim3 blocks = kf_cluster_dim();
    return {blocks.x * blockDim.x, blocks.y * blockDim.y, blocks.z * blockDim.z};
  }
  static unsigned num_threads() { return kf_cluster_size() * threads_of_block(); }
  static unsigned size() { return num_threads(); }

 private:
  static unsigned threads_of_block() { return blockDim.x * blockDim.y * blockDim.z; }
};
inline cluster_group this_cluster() { return {}; }

}  // namespace cooperative_groups
}  // namespace kf::simt
