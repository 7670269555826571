// Indices, barriers and warp operations, as kernels see them.
#pragma once

#include <cstring>

#include "kf_simt/types.h"

#ifndef __clang__
#if __cplusplus > 201703L
#include <source_location>
#else
// What g++ puts a place into; C++20's header is empty before C++20.
namespace std {
struct source_location {
  struct __impl {
    const char *_M_file_name, *_M_function_name;
    unsigned _M_line, _M_column;
  };
};
}  // namespace std
#endif
#endif

namespace kf::simt {

// Set whenever a thread of the grid is resumed. Constant for the thread that reads them, so a kernel cannot assign to
// them and the compiler may keep them in registers across barriers. The runtime sees them without the const.
#ifdef KF_SIMT_RUNTIME
#define KF_SIMT_INDEX extern __thread
#else
#define KF_SIMT_INDEX extern __thread const
#endif
KF_SIMT_INDEX uint3 threadIdx, blockIdx;
KF_SIMT_INDEX dim3 blockDim, gridDim;
#undef KF_SIMT_INDEX
constexpr int warpSize = 32;

// A place in the source, to tell barriers apart and to name them. The column is that of the rewritten line, and serves
// only to tell two on one line apart.
struct CallSite {
  const char* file;
  int line;
  unsigned column;
#ifdef __clang__
#define KF_SIMT_COLUMN __builtin_COLUMN()
#elif __cplusplus > 201703L
#define KF_SIMT_COLUMN std::source_location::current().column()
#else
#define KF_SIMT_COLUMN static_cast<const std::source_location::__impl*>(__builtin_source_location())->_M_column
#endif
  static constexpr CallSite here(const char* file = __builtin_FILE(), int line = __builtin_LINE(),
                                 unsigned column = KF_SIMT_COLUMN) {
    return {file, line, column};
  }
#undef KF_SIMT_COLUMN
  // Of several barriers in one macro, which are all at one place.
  constexpr CallSite nth(unsigned n) const { return {file, line, column + (n << 16)}; }
};

// Whether a kernel's thread runs, not the host: functions that are both have a body for each (see views.py).
bool on_device();

enum class BarrierVote { kNone, kCount, kAnd, kOr };
int block_barrier(BarrierVote vote, int predicate, CallSite site);

inline void __syncthreads(CallSite site = CallSite::here()) { block_barrier(BarrierVote::kNone, 0, site); }
inline int __syncthreads_count(int predicate, CallSite site = CallSite::here()) {
  return block_barrier(BarrierVote::kCount, predicate, site);
}
inline int __syncthreads_and(int predicate, CallSite site = CallSite::here()) {
  return block_barrier(BarrierVote::kAnd, predicate, site);
}
inline int __syncthreads_or(int predicate, CallSite site = CallSite::here()) {
  return block_barrier(BarrierVote::kOr, predicate, site);
}

// The barrier of a whole grid that was launched cooperatively.
void grid_barrier(CallSite site);

// bar.sync and bar.arrive (wait = false) of PTX: a barrier of the block with a number from 0 to 15, which `threads`
// threads pass, all of them or some.
void named_barrier(unsigned id, unsigned threads, bool wait, CallSite site);

// Clusters. A launch without them has clusters of one block. Arriving releases, waiting acquires.
unsigned kf_cluster_rank();          // of this block in its cluster
unsigned kf_cluster_size();          // in blocks
dim3 kf_cluster_dim();               // in blocks
uint3 kf_cluster_index();            // of this cluster in the grid
uint3 kf_cluster_block_index();      // of this block in its cluster
dim3 kf_grid_clusters();             // clusters of the grid
void cluster_arrive(CallSite site);  // each thread arrives once, then waits
void cluster_wait(CallSite site);

// Shared memory as a 32-bit address, as PTX names it: 18 bits in the block's own memory; for that of another block of
// the cluster, its rank + 1 stands above bit 24.
unsigned kf_shared_address(const void* generic);
void* kf_shared_pointer(unsigned address);
// The same place in the block of this rank, which must be at work.
unsigned map_shared_rank(unsigned address, unsigned rank);
void* map_shared_rank(const void* generic, unsigned rank);
bool kf_is_shared(const void* generic);          // in the memory of this block
bool kf_is_cluster_shared(const void* generic);  // in that of any block of the cluster

inline std::size_t __cvta_generic_to_shared(const void* generic) { return kf_shared_address(generic); }
inline void* __cvta_shared_to_generic(std::size_t address) { return kf_shared_pointer(static_cast<unsigned>(address)); }
inline std::size_t __cvta_generic_to_global(const void* generic) { return reinterpret_cast<std::size_t>(generic); }
inline unsigned __isShared(const void* generic) { return kf_is_shared(generic); }
inline unsigned __isClusterShared(const void* generic) { return kf_is_cluster_shared(generic); }
inline unsigned __isGlobal(const void* generic) { return !kf_is_cluster_shared(generic); }

// The lane of the calling thread in its warp.
extern __thread unsigned current_lane;
inline unsigned kf_lane_id() { return current_lane; }

// A warp operation: every lane named in `mask` that has not exited arrives with its record; the last one calls
// work(records, present), where records[lane] is null for a lane that is not present; then all go on. `kind` tells
// operations apart, so that lanes that meet in different ones are found out.
enum class WarpKind { kSync, kShuffle, kVote, kMatch, kReduce, kCollective };
using WarpWork = void (*)(void* const* records, unsigned present);
void warp_operation(WarpKind kind, unsigned mask, void* record, WarpWork work, const char* name, CallSite site);

// The same for wrappers of warp-wide instructions (matrix products, for example) that are defined elsewhere:
// `Work` is a stateless function object called as Work{}(Lane* const* lanes, unsigned present).
template <class Work, class Lane>
void warp_collective(const char* name, Lane& lane, unsigned mask = 0xffffffffu, CallSite site = CallSite::here(),
                     WarpKind kind = WarpKind::kCollective) {
  warp_operation(
      kind, mask, &lane,
      [](void* const* records, unsigned present) { Work{}(reinterpret_cast<Lane* const*>(records), present); }, name,
      site);
}

inline void __syncwarp(unsigned mask = 0xffffffffu, CallSite site = CallSite::here()) {
  warp_operation(WarpKind::kSync, mask, nullptr, nullptr, "__syncwarp", site);
}

struct ShuffleLane {
  std::uint64_t value;  // in: what this lane offers; out: what it got
  int source;           // the lane that it reads
#ifdef KF_SIMT_TRACE
  const char* type = nullptr;  // the name of a function that has it
#endif
};
void shuffle(ShuffleLane& lane, unsigned mask, const char* name, CallSite site);

[[noreturn]] void bad_width(int width, const char* name, CallSite site);

// The segment of `width` lanes that contains this lane.
struct ShuffleSegment {
  int lane, first, last;
  ShuffleSegment(int width, const char* name, CallSite site) : lane(static_cast<int>(kf_lane_id())) {
    if (width < 1 || width > warpSize || (width & (width - 1)) != 0) bad_width(width, name, site);
    first = lane & ~(width - 1);
    last = first + width - 1;
  }
};

template <class T>
T shuffle_from(T value, int source, unsigned mask, const char* name, CallSite site) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t), "a shuffle moves at most 8 bytes");
  ShuffleLane lane{0, source};
  std::memcpy(&lane.value, &value, sizeof(T));
#ifdef KF_SIMT_TRACE
  lane.type = __PRETTY_FUNCTION__;
#endif
  shuffle(lane, mask, name, site);
  std::memcpy(static_cast<void*>(&value), &lane.value, sizeof(T));
  return value;
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize, CallSite site = CallSite::here()) {
  const ShuffleSegment s(width, "__shfl_sync", site);
  return shuffle_from(value, s.first + (source & (width - 1)), mask, "__shfl_sync", site);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize, CallSite site = CallSite::here()) {
  const ShuffleSegment s(width, "__shfl_up_sync", site);
  const bool inside = delta <= static_cast<unsigned>(s.lane - s.first);
  return shuffle_from(value, inside ? s.lane - static_cast<int>(delta) : s.lane, mask, "__shfl_up_sync", site);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize, CallSite site = CallSite::here()) {
  const ShuffleSegment s(width, "__shfl_down_sync", site);
  const bool inside = delta <= static_cast<unsigned>(s.last - s.lane);
  return shuffle_from(value, inside ? s.lane + static_cast<int>(delta) : s.lane, mask, "__shfl_down_sync", site);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = warpSize, CallSite site = CallSite::here()) {
  const ShuffleSegment s(width, "__shfl_xor_sync", site);
  const int source = s.lane ^ (lane_mask & 31);
  return shuffle_from(value, source <= s.last ? source : s.lane, mask, "__shfl_xor_sync", site);
}

unsigned ballot(unsigned mask, bool predicate, const char* name, unsigned* present, CallSite site);

inline unsigned __ballot_sync(unsigned mask, int predicate, CallSite site = CallSite::here()) {
  return ballot(mask, predicate != 0, "__ballot_sync", nullptr, site);
}
inline int __any_sync(unsigned mask, int predicate, CallSite site = CallSite::here()) {
  return ballot(mask, predicate != 0, "__any_sync", nullptr, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, CallSite site = CallSite::here()) {
  return ballot(mask, predicate == 0, "__all_sync", nullptr, site) == 0;
}
inline int __uni_sync(unsigned mask, int predicate, CallSite site = CallSite::here()) {
  unsigned present = 0;
  const unsigned set = ballot(mask, predicate != 0, "__uni_sync", &present, site);
  return set == 0 || set == present;
}

struct MatchLane {
  std::uint64_t value;
  unsigned same;     // the lanes with this lane's value
  unsigned present;  // the lanes that took part
};
MatchLane match(unsigned mask, std::uint64_t value, const char* name, CallSite site);

template <class T>
std::uint64_t bits_of(T value) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t), "a match compares at most 8 bytes");
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
unsigned __match_any_sync(unsigned mask, T value, CallSite site = CallSite::here()) {
  return match(mask, bits_of(value), "__match_any_sync", site).same;
}

template <class T>
unsigned __match_all_sync(unsigned mask, T value, int* predicate, CallSite site = CallSite::here()) {
  const MatchLane lane = match(mask, bits_of(value), "__match_all_sync", site);
  *predicate = lane.same == lane.present;
  return *predicate ? lane.present : 0;
}

// The lanes that are here together: as many as can be, since a lane waits until no other lane of its warp can run.
unsigned __activemask(CallSite site = CallSite::here());

template <class T, class Op>
struct ReduceWork {
  __attribute__((no_sanitize_thread)) void operator()(T* const* lanes, unsigned present) const {
    T total{};
    bool first = true;
    for (int i = 0; i < warpSize; ++i) {
      if (!(present >> i & 1)) continue;
      total = first ? *lanes[i] : Op{}(total, *lanes[i]);
      first = false;
    }
    for (int i = 0; i < warpSize; ++i) {
      if (present >> i & 1) *lanes[i] = total;
    }
  }
};

#define KF_SIMT_REDUCE(name, T, expression)                                          \
  inline T name(unsigned mask, T value, CallSite site = CallSite::here()) {          \
    struct Op {                                                                      \
      T operator()(T a, T b) const { return expression; }                            \
    };                                                                               \
    warp_collective<ReduceWork<T, Op>>(#name, value, mask, site, WarpKind::kReduce); \
    return value;                                                                    \
  }
KF_SIMT_REDUCE(__reduce_add_sync, unsigned, a + b)
KF_SIMT_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
KF_SIMT_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
KF_SIMT_REDUCE(__reduce_add_sync, int, static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b)))
KF_SIMT_REDUCE(__reduce_min_sync, int, a < b ? a : b)
KF_SIMT_REDUCE(__reduce_max_sync, int, a > b ? a : b)
KF_SIMT_REDUCE(__reduce_and_sync, unsigned, a& b)
KF_SIMT_REDUCE(__reduce_or_sync, unsigned, a | b)
KF_SIMT_REDUCE(__reduce_xor_sync, unsigned, a ^ b)
#undef KF_SIMT_REDUCE

// Ends the launch with an Error that names the calling thread.
[[noreturn]] void kernel_error(const char* what, CallSite site);
inline void __trap(CallSite site = CallSite::here()) { kernel_error("__trap()", site); }
inline void __brkpt() {}

// What assert() calls. Outside of a kernel it ends the program, as usual.
[[noreturn]] void assert_failed(const char* expression, const char* file, unsigned line, const char* function);

// A thread that reads memory in a loop until another thread changes it must let the others run. Reads that return to
// one of the two places read last are such a loop; a stream of reads is not. Each thread counts for itself: the lanes
// of a warp may poll a place each, and vote in between.
constexpr unsigned kPolls = 32;
struct PollState {
  unsigned count;
  unsigned changed;  // this thread has changed memory since it last gave way
  const void* places[2];
};
extern __thread PollState poll_state;
void poll_yield();
void poll_yield(const char* name, CallSite site);  // names what is waited for, should it never come

KF_SIMT_UNINSTRUMENTED inline void note_poll() {
  if (++poll_state.count >= kPolls) poll_yield();
}

KF_SIMT_UNINSTRUMENTED inline void note_poll(const void* address) {
  PollState& p = poll_state;
  if (p.places[0] == address || p.places[1] == address) {
    note_poll();
  } else {
    p.places[1] = p.places[0];
    p.places[0] = address;
    p.count = 0;
  }
}

KF_SIMT_UNINSTRUMENTED inline void note_change() { poll_state.changed = 1; }

// For code that moves memory or orders threads on behalf of the running thread, out of a sanitizer's sight: what it
// reads and writes, and what a thread that acquires an address has waited for: those that released it before.
#ifdef KF_SIMT_INSTRUMENTED
extern "C" void __tsan_read_range(void* address, unsigned long bytes);
extern "C" void __tsan_write_range(void* address, unsigned long bytes);
inline void note_read(const void* address, std::size_t bytes) { __tsan_read_range(const_cast<void*>(address), bytes); }
inline void note_write(const void* address, std::size_t bytes) {
  __tsan_write_range(const_cast<void*>(address), bytes);
}
#else
inline void note_read(const void*, std::size_t) {}
inline void note_write(const void*, std::size_t) {}
#endif
#ifdef KF_SIMT_TSAN
void order_release(const void* address);
void order_acquire(const void* address);
void order_fence();
#else
inline void order_release(const void*) {}
inline void order_acquire(const void*) {}
inline void order_fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
#endif

inline void __threadfence() {
  order_fence();
  note_poll();
}
inline void __threadfence_block() { __threadfence(); }
inline void __threadfence_system() { __threadfence(); }
void __nanosleep(unsigned nanoseconds);

long long clock64();

// Loads and stores with a cache hint. Those that read the caches shared by all SMs may be polls.
#define KF_SIMT_LOAD(name)   \
  template <class T>         \
  T name(const T* address) { \
    return *address;         \
  }
KF_SIMT_LOAD(__ldg)
KF_SIMT_LOAD(__ldca)
KF_SIMT_LOAD(__ldcs)
KF_SIMT_LOAD(__ldlu)
#undef KF_SIMT_LOAD
#define KF_SIMT_LOAD(name)                                    \
  template <class T>                                          \
  T name(const T* address) {                                  \
    note_poll(address);                                       \
    asm volatile("" ::: "memory"); /* read again each time */ \
    return *address;                                          \
  }
KF_SIMT_LOAD(__ldcg)
KF_SIMT_LOAD(__ldcv)
#undef KF_SIMT_LOAD
#define KF_SIMT_STORE(name)        \
  template <class T>               \
  void name(T* address, T value) { \
    *address = value;              \
  }
KF_SIMT_STORE(__stwb)
KF_SIMT_STORE(__stcg)
KF_SIMT_STORE(__stcs)
KF_SIMT_STORE(__stwt)
#undef KF_SIMT_STORE

}  // namespace kf::simt
