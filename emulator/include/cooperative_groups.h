// Cooperative groups: the thread block, tiles of a warp, the threads that are here together, the grid, the cluster.
#pragma once

#include <type_traits>
#include <utility>

#include "cuda_runtime.h"

namespace kf::simt {
namespace cooperative_groups {

class thread_group;
class coalesced_group;
coalesced_group tiled_partition(const thread_group& parent, unsigned size);

// Any group, as functions take it that do not care which. A group of a warp knows its lanes.
class thread_group {
 public:
  unsigned long long num_threads() const {
    return kind_ == kGrid ? threads_of_grid() : kind_ == kBlock ? threads_of_block() : lanes();
  }
  unsigned long long size() const { return num_threads(); }
  unsigned long long thread_rank() const {
    if (kind_ == kGrid) return rank_of_block() * threads_of_block() + rank_in_block();
    return kind_ == kBlock ? rank_in_block() : rank_of(kf_lane_id());
  }
  void sync(CallSite site = CallSite::here()) const {
    if (kind_ == kGrid) {
      grid_barrier(site);
    } else if (kind_ == kBlock) {
      __syncthreads(site);
    } else {
      __syncwarp(mask_, site);
    }
  }

 protected:
  enum Kind { kLanes, kBlock, kGrid };
  explicit thread_group(Kind kind) : kind_(kind), mask_(0) {}
  explicit thread_group(unsigned mask) : kind_(kLanes), mask_(mask) {}

  static unsigned threads_of_block() { return blockDim.x * blockDim.y * blockDim.z; }
  static unsigned rank_in_block() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
  static unsigned long long rank_of_block() {
    return blockIdx.x + 1ULL * gridDim.x * (blockIdx.y + 1ULL * gridDim.y * blockIdx.z);
  }
  static unsigned long long threads_of_grid() { return 1ULL * gridDim.x * gridDim.y * gridDim.z * threads_of_block(); }
  unsigned lanes() const { return static_cast<unsigned>(__popc(mask_)); }
  unsigned rank_of(unsigned lane) const { return static_cast<unsigned>(__popc(mask_ & ((1u << lane) - 1))); }

  friend coalesced_group tiled_partition(const thread_group& parent, unsigned size);
  friend unsigned lanes_of(const thread_group& group);

  Kind kind_;
  unsigned mask_;
};

// The barrier of a group is split in name only: whoever waits, waits for all to arrive and to wait.
struct arrival_token {};

class thread_block : public thread_group {
 public:
  using arrival_token = cooperative_groups::arrival_token;
  thread_block() : thread_group(kBlock) {}
  static void sync(CallSite site = CallSite::here()) { __syncthreads(site); }
  static arrival_token barrier_arrive() { return {}; }
  static void barrier_wait(CallSite site = CallSite::here()) { __syncthreads(site); }
  static void barrier_wait(arrival_token&&, CallSite site = CallSite::here()) { __syncthreads(site); }
  static unsigned thread_rank() { return rank_in_block(); }
  static unsigned num_threads() { return threads_of_block(); }
  static unsigned size() { return threads_of_block(); }
  static dim3 group_index() { return blockIdx; }
  static dim3 thread_index() { return threadIdx; }
  static dim3 group_dim() { return blockDim; }
  static dim3 dim_threads() { return blockDim; }
};
inline thread_block this_thread_block() { return {}; }

class grid_group : public thread_group {
 public:
  using arrival_token = cooperative_groups::arrival_token;
  grid_group() : thread_group(kGrid) {}
  static bool is_valid() { return true; }
  static void sync(CallSite site = CallSite::here()) { grid_barrier(site); }
  static arrival_token barrier_arrive() { return {}; }
  static void barrier_wait(arrival_token&&, CallSite site = CallSite::here()) { grid_barrier(site); }
  static unsigned long long num_blocks() { return 1ULL * gridDim.x * gridDim.y * gridDim.z; }
  static unsigned long long block_rank() { return rank_of_block(); }
  static unsigned long long num_threads() { return threads_of_grid(); }
  static unsigned long long size() { return threads_of_grid(); }
  static unsigned long long thread_rank() { return rank_of_block() * threads_of_block() + rank_in_block(); }
  static dim3 group_dim() { return gridDim; }
  static dim3 dim_blocks() { return gridDim; }
  static dim3 dim_threads() { return {gridDim.x * blockDim.x, gridDim.y * blockDim.y, gridDim.z * blockDim.z}; }
  static dim3 block_index() { return blockIdx; }
  static dim3 thread_index() {
    return {blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y,
            blockIdx.z * blockDim.z + threadIdx.z};
  }
};
inline grid_group this_grid() { return {}; }

// Some lanes of a warp. Ranks count the lanes of the mask from below.
class warp_group : public thread_group {
 public:
  unsigned num_threads() const { return lanes(); }
  unsigned size() const { return lanes(); }
  unsigned thread_rank() const { return rank_of(kf_lane_id()); }
  void sync(CallSite site = CallSite::here()) const { __syncwarp(mask_, site); }

  template <class T>
  T shfl(T value, unsigned rank, CallSite site = CallSite::here()) const {
    return from(value, rank % num_threads(), site);
  }
  template <class T>
  T shfl_up(T value, unsigned delta, CallSite site = CallSite::here()) const {
    const unsigned rank = thread_rank();
    return from(value, delta <= rank ? rank - delta : rank, site);
  }
  template <class T>
  T shfl_down(T value, unsigned delta, CallSite site = CallSite::here()) const {
    const unsigned rank = thread_rank();
    return from(value, delta < num_threads() - rank ? rank + delta : rank, site);
  }
  int any(int predicate, CallSite site = CallSite::here()) const { return __any_sync(mask_, predicate, site); }
  int all(int predicate, CallSite site = CallSite::here()) const { return __all_sync(mask_, predicate, site); }
  unsigned ballot(int predicate, CallSite site = CallSite::here()) const {
    return packed(__ballot_sync(mask_, predicate, site));
  }
  template <class T>
  unsigned match_any(T value, CallSite site = CallSite::here()) const {
    return packed(__match_any_sync(mask_, value, site));
  }
  template <class T>
  unsigned match_all(T value, int& predicate, CallSite site = CallSite::here()) const {
    return packed(__match_all_sync(mask_, value, &predicate, site));
  }

 protected:
  explicit warp_group(unsigned mask) : thread_group(mask) {}

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
  // A shuffle moves 8 bytes; a larger value goes in pieces.
  template <class T>
  T from(T value, unsigned rank, CallSite site) const {
    static_assert(std::is_trivially_copyable_v<T>, "a shuffle copies bytes");
    const int lane = static_cast<int>(lane_of(rank));
    if constexpr (sizeof(T) <= 8) {
      return __shfl_sync(mask_, value, lane, warpSize, site);
    } else {
      std::uint64_t pieces[(sizeof(T) + 7) / 8] = {};
      std::memcpy(pieces, &value, sizeof(T));
      for (std::uint64_t& piece : pieces) piece = __shfl_sync(mask_, piece, lane, warpSize, site);
      std::memcpy(static_cast<void*>(&value), pieces, sizeof(T));
      return value;
    }
  }
};

template <unsigned Size, class Parent = void>
class thread_block_tile;

// What functions take that do not care what the tile was cut from.
template <unsigned Size>
class thread_block_tile<Size, void> : public warp_group {
  static_assert(Size >= 1 && Size <= 32 && (Size & (Size - 1)) == 0, "a tile has 1, 2, 4, 8, 16 or 32 threads");

 public:
  static constexpr unsigned num_threads() { return Size; }
  static constexpr unsigned size() { return Size; }
  static unsigned thread_rank() { return kf_lane_id() & (Size - 1); }
  unsigned meta_group_rank() const { return meta_rank_; }
  unsigned meta_group_size() const { return meta_size_; }
  template <class T>
  T shfl_xor(T value, unsigned mask, CallSite site = CallSite::here()) const {
    return from(value, (thread_rank() ^ mask) < Size ? thread_rank() ^ mask : thread_rank(), site);
  }

 protected:
  // From the calling thread's rank in the parent, and the parent's size.
  thread_block_tile(unsigned rank, unsigned size)
      : warp_group((Size == 32 ? ~0u : (1u << Size % 32) - 1) << (kf_lane_id() & ~(Size - 1))),
        meta_rank_(rank / Size),
        meta_size_((size + Size - 1) / Size) {}

 private:
  unsigned meta_rank_, meta_size_;
};

template <unsigned Size, class Parent>
class thread_block_tile : public thread_block_tile<Size, void> {
 public:
  explicit thread_block_tile(const Parent& parent)
      : thread_block_tile<Size, void>(parent.thread_rank(), parent.num_threads()) {}
};

template <unsigned Size, class Parent>
thread_block_tile<Size, Parent> tiled_partition(const Parent& parent) {
  return thread_block_tile<Size, Parent>(parent);
}

class coalesced_group : public warp_group {
 public:
  explicit coalesced_group(unsigned mask, unsigned meta_rank = 0, unsigned meta_size = 1)
      : warp_group(mask), meta_rank_(meta_rank), meta_size_(meta_size) {}
  unsigned meta_group_rank() const { return meta_rank_; }
  unsigned meta_group_size() const { return meta_size_; }

 private:
  unsigned meta_rank_, meta_size_;
};
inline coalesced_group coalesced_threads(CallSite site = CallSite::here()) {
  return coalesced_group(__activemask(site));
}

inline unsigned lanes_of(const thread_group& group) { return group.mask_; }

// `size` threads with neighbouring ranks: 1, 2, 4, 8, 16 or 32, no more than fit into a warp.
inline coalesced_group tiled_partition(const thread_group& parent, unsigned size) {
  const unsigned part =
      parent.kind_ == thread_group::kLanes ? parent.rank_of(kf_lane_id()) / size : thread_group::rank_in_block() / size;
  const auto parts = static_cast<unsigned>((parent.num_threads() + size - 1) / size);
  unsigned mask = 0;
  for (unsigned lane = 0; lane < warpSize; ++lane) {
    if (parent.kind_ == thread_group::kLanes) {
      if (parent.mask_ >> lane & 1 && parent.rank_of(lane) / size == part) mask |= 1u << lane;
    } else if (lane / size == kf_lane_id() / size) {
      mask |= 1u << lane;
    }
  }
  return coalesced_group(mask, part, parts);
}

// The threads of a group of a warp with the same label, or with the same answer.
template <class Label>
coalesced_group labeled_partition(const warp_group& group, Label label, CallSite site = CallSite::here()) {
  static_assert(std::is_integral_v<Label>, "a label is an integer");
  const unsigned lanes = lanes_of(group);
  const unsigned mine = __match_any_sync(lanes, label, site);
  // The parts are numbered by their first lanes.
  const bool first = static_cast<int>(kf_lane_id()) == __ffs(static_cast<int>(mine)) - 1;
  const unsigned firsts = __ballot_sync(lanes, first, site);
  const unsigned below = firsts & ((mine & (0u - mine)) - 1);
  return coalesced_group(mine, static_cast<unsigned>(__popc(below)), static_cast<unsigned>(__popc(firsts)));
}
inline coalesced_group binary_partition(const warp_group& group, bool predicate, CallSite site = CallSite::here()) {
  const unsigned yes = __ballot_sync(lanes_of(group), predicate, site);
  return coalesced_group(predicate ? yes : lanes_of(group) & ~yes, predicate ? 1 : 0, 2);
}

template <class Group>
void sync(const Group& group, CallSite site = CallSite::here()) {
  group.sync(site);
}

// One thread of the group calls the function; with `broadcast` all get its result.
template <class Group, class Function, class... Args>
void invoke_one(const Group& group, Function&& function, Args&&... args) {
  if (group.thread_rank() == 0) std::forward<Function>(function)(std::forward<Args>(args)...);
}
template <class Group, class Function, class... Args>
auto invoke_one_broadcast(const Group& group, Function&& function, Args&&... args) {
  std::decay_t<std::invoke_result_t<Function, Args...>> result{};
  if (group.thread_rank() == 0) result = std::forward<Function>(function)(std::forward<Args>(args)...);
  return group.shfl(result, 0);
}

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
    return kf_cluster_rank() * thread_block::num_threads() + thread_block::thread_rank();
  }
  static dim3 dim_threads() {
    const dim3 blocks = kf_cluster_dim();
    return {blocks.x * blockDim.x, blocks.y * blockDim.y, blocks.z * blockDim.z};
  }
  static unsigned num_threads() { return kf_cluster_size() * thread_block::num_threads(); }
  static unsigned size() { return num_threads(); }
};
inline cluster_group this_cluster() { return {}; }

}  // namespace cooperative_groups
}  // namespace kf::simt
