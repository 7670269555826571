// Cooperative groups: the thread block, tiles of a warp, the threads that are here together, the grid.
#pragma once

#include "cuda_runtime.h"

namespace kf::simt {
namespace cooperative_groups {

class thread_block {
 public:
  static void sync(Site site = Site::here()) { __syncthreads(site); }
  static void barrier_wait(Site site = Site::here()) { __syncthreads(site); }
  static unsigned thread_rank() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
  static unsigned num_threads() { return blockDim.x * blockDim.y * blockDim.z; }
  static unsigned size() { return num_threads(); }
  static dim3 group_index() { return blockIdx; }
  static dim3 thread_index() { return threadIdx; }
  static dim3 group_dim() { return blockDim; }
  static dim3 dim_threads() { return blockDim; }
};
inline thread_block this_thread_block() { return {}; }

class grid_group {
 public:
  static bool is_valid() { return true; }
  static void sync(Site site = Site::here()) { grid_barrier(site); }
  static unsigned long long num_blocks() { return 1ULL * gridDim.x * gridDim.y * gridDim.z; }
  static unsigned long long block_rank() {
    return blockIdx.x + 1ULL * gridDim.x * (blockIdx.y + 1ULL * gridDim.y * blockIdx.z);
  }
  static unsigned long long num_threads() { return num_blocks() * thread_block::num_threads(); }
  static unsigned long long size() { return num_threads(); }
  static unsigned long long thread_rank() {
    return block_rank() * thread_block::num_threads() + thread_block::thread_rank();
  }
  static dim3 group_dim() { return gridDim; }
  static dim3 dim_blocks() { return gridDim; }
  static dim3 block_index() { return blockIdx; }
};
inline grid_group this_grid() { return {}; }

// Some lanes of a warp. Ranks count the lanes of the mask from below.
class warp_group {
 public:
  unsigned num_threads() const { return static_cast<unsigned>(__popc(mask_)); }
  unsigned size() const { return num_threads(); }
  unsigned thread_rank() const { return rank_of(lane_id()); }
  void sync(Site site = Site::here()) const { __syncwarp(mask_, site); }

  template <class T>
  T shfl(T value, unsigned rank, Site site = Site::here()) const {
    return from(value, rank % num_threads(), site);
  }
  template <class T>
  T shfl_up(T value, unsigned delta, Site site = Site::here()) const {
    const unsigned rank = thread_rank();
    return from(value, delta <= rank ? rank - delta : rank, site);
  }
  template <class T>
  T shfl_down(T value, unsigned delta, Site site = Site::here()) const {
    const unsigned rank = thread_rank();
    return from(value, delta < num_threads() - rank ? rank + delta : rank, site);
  }
  int any(int predicate, Site site = Site::here()) const { return __any_sync(mask_, predicate, site); }
  int all(int predicate, Site site = Site::here()) const { return __all_sync(mask_, predicate, site); }
  unsigned ballot(int predicate, Site site = Site::here()) const {
    return packed(__ballot_sync(mask_, predicate, site));
  }
  template <class T>
  unsigned match_any(T value, Site site = Site::here()) const {
    return packed(__match_any_sync(mask_, value, site));
  }
  template <class T>
  unsigned match_all(T value, int& predicate, Site site = Site::here()) const {
    return packed(__match_all_sync(mask_, value, &predicate, site));
  }

 protected:
  explicit warp_group(unsigned mask) : mask_(mask) {}

  unsigned rank_of(unsigned lane) const { return static_cast<unsigned>(__popc(mask_ & ((1u << lane) - 1))); }
  unsigned lane_of(unsigned rank) const {
    unsigned rest = mask_;
    for (; rank > 0; --rank) rest &= rest - 1;
    return static_cast<unsigned>(__ffs(static_cast<int>(rest)) - 1);
  }
  unsigned packed(unsigned lanes) const {
    unsigned result = 0;
    for (unsigned lane = 0; lane < warpSize; ++lane) {
      if (lanes >> lane & 1) result |= 1u << rank_of(lane);
    }
    return result;
  }
  template <class T>
  T from(T value, unsigned rank, Site site) const {
    return __shfl_sync(mask_, value, static_cast<int>(lane_of(rank)), warpSize, site);
  }

  unsigned mask_;
};

template <unsigned Size, class Parent = thread_block>
class thread_block_tile : public warp_group {
  static_assert(Size >= 1 && Size <= 32 && (Size & (Size - 1)) == 0, "a tile has 1, 2, 4, 8, 16 or 32 threads");

 public:
  thread_block_tile() : warp_group((Size == 32 ? ~0u : (1u << Size % 32) - 1) << (lane_id() & ~(Size - 1))) {}
  static constexpr unsigned num_threads() { return Size; }
  static constexpr unsigned size() { return Size; }
  static unsigned thread_rank() { return lane_id() & (Size - 1); }
  static unsigned meta_group_rank() { return thread_block::thread_rank() / Size; }
  static unsigned meta_group_size() { return (thread_block::num_threads() + Size - 1) / Size; }
  template <class T>
  T shfl_xor(T value, unsigned mask, Site site = Site::here()) const {
    return __shfl_xor_sync(mask_, value, static_cast<int>(mask), Size, site);
  }
};

template <unsigned Size, class Parent>
thread_block_tile<Size, Parent> tiled_partition(const Parent&) {
  return {};
}

class coalesced_group : public warp_group {
 public:
  explicit coalesced_group(unsigned mask) : warp_group(mask) {}
};
inline coalesced_group coalesced_threads(Site site = Site::here()) { return coalesced_group(__activemask(site)); }

template <class Group>
void sync(const Group& group, Site site = Site::here()) {
  group.sync(site);
}

}  // namespace cooperative_groups
}  // namespace kf::simt
