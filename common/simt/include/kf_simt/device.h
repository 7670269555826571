// Indices, barriers and warp operations, as kernels see them.
#pragma once

#include <cstring>

#include "kf_simt/types.h"

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

// A place in the source, to tell barriers apart and to name them.
struct Site {
  const char* file;
  int line;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

enum class Vote { kNone, kCount, kAnd, kOr };
int block_barrier(Vote vote, int predicate, Site site);

inline void __syncthreads(Site site = Site::here()) { block_barrier(Vote::kNone, 0, site); }
inline int __syncthreads_count(int predicate, Site site = Site::here()) {
  return block_barrier(Vote::kCount, predicate, site);
}
inline int __syncthreads_and(int predicate, Site site = Site::here()) {
  return block_barrier(Vote::kAnd, predicate, site);
}
inline int __syncthreads_or(int predicate, Site site = Site::here()) {
  return block_barrier(Vote::kOr, predicate, site);
}

// The barrier of a whole grid that was launched cooperatively.
void grid_barrier(Site site);

// The lane of the calling thread in its warp.
extern __thread unsigned current_lane;
inline unsigned lane_id() { return current_lane; }

// A warp operation: every lane named in `mask` that has not exited arrives with its record; the last one calls
// work(records, present), where records[lane] is null for a lane that is not present; then all go on. `kind` tells
// operations apart, so that lanes that meet in different ones are found out.
enum class WarpKind { kSync, kShuffle, kVote, kMatch, kReduce, kCollective };
using WarpWork = void (*)(void* const* records, unsigned present);
void warp_operation(WarpKind kind, unsigned mask, void* record, WarpWork work, const char* name, Site site);

// The same for wrappers of warp-wide instructions (matrix products, for example) that are defined elsewhere:
// `Work` is a stateless function object called as Work{}(Lane* const* lanes, unsigned present).
template <class Work, class Lane>
void warp_collective(const char* name, Lane& lane, unsigned mask = 0xffffffffu, Site site = Site::here()) {
  warp_operation(
      WarpKind::kCollective, mask, &lane,
      [](void* const* records, unsigned present) { Work{}(reinterpret_cast<Lane* const*>(records), present); }, name,
      site);
}

inline void __syncwarp(unsigned mask = 0xffffffffu, Site site = Site::here()) {
  warp_operation(WarpKind::kSync, mask, nullptr, nullptr, "__syncwarp", site);
}

struct ShuffleLane {
  std::uint64_t value;  // in: what this lane offers; out: what it got
  int source;           // the lane that it reads
};
void shuffle(ShuffleLane& lane, unsigned mask, const char* name, Site site);

[[noreturn]] void bad_width(int width, const char* name, Site site);

// The segment of `width` lanes that contains this lane.
struct Segment {
  int lane, first, last;
  Segment(int width, const char* name, Site site) : lane(static_cast<int>(lane_id())) {
    if (width < 1 || width > warpSize || (width & (width - 1)) != 0) bad_width(width, name, site);
    first = lane & ~(width - 1);
    last = first + width - 1;
  }
};

template <class T>
T shuffle_from(T value, int source, unsigned mask, const char* name, Site site) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t), "a shuffle moves at most 8 bytes");
  ShuffleLane lane{0, source};
  std::memcpy(&lane.value, &value, sizeof(T));
  shuffle(lane, mask, name, site);
  std::memcpy(static_cast<void*>(&value), &lane.value, sizeof(T));
  return value;
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize, Site site = Site::here()) {
  const Segment s(width, "__shfl_sync", site);
  return shuffle_from(value, s.first + (source & (width - 1)), mask, "__shfl_sync", site);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize, Site site = Site::here()) {
  const Segment s(width, "__shfl_up_sync", site);
  const bool inside = delta <= static_cast<unsigned>(s.lane - s.first);
  return shuffle_from(value, inside ? s.lane - static_cast<int>(delta) : s.lane, mask, "__shfl_up_sync", site);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize, Site site = Site::here()) {
  const Segment s(width, "__shfl_down_sync", site);
  const bool inside = delta <= static_cast<unsigned>(s.last - s.lane);
  return shuffle_from(value, inside ? s.lane + static_cast<int>(delta) : s.lane, mask, "__shfl_down_sync", site);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = warpSize, Site site = Site::here()) {
  const Segment s(width, "__shfl_xor_sync", site);
  const int source = s.lane ^ (lane_mask & 31);
  return shuffle_from(value, source <= s.last ? source : s.lane, mask, "__shfl_xor_sync", site);
}

unsigned ballot(unsigned mask, bool predicate, const char* name, unsigned* present, Site site);

inline unsigned __ballot_sync(unsigned mask, int predicate, Site site = Site::here()) {
  return ballot(mask, predicate != 0, "__ballot_sync", nullptr, site);
}
inline int __any_sync(unsigned mask, int predicate, Site site = Site::here()) {
  return ballot(mask, predicate != 0, "__any_sync", nullptr, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, Site site = Site::here()) {
  return ballot(mask, predicate == 0, "__all_sync", nullptr, site) == 0;
}
inline int __uni_sync(unsigned mask, int predicate, Site site = Site::here()) {
  unsigned present = 0;
  const unsigned set = ballot(mask, predicate != 0, "__uni_sync", &present, site);
  return set == 0 || set == present;
}

struct MatchLane {
  std::uint64_t value;
  unsigned same;     // the lanes with this lane's value
  unsigned present;  // the lanes that took part
};
MatchLane match(unsigned mask, std::uint64_t value, const char* name, Site site);

template <class T>
std::uint64_t bits_of(T value) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t), "a match compares at most 8 bytes");
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
unsigned __match_any_sync(unsigned mask, T value, Site site = Site::here()) {
  return match(mask, bits_of(value), "__match_any_sync", site).same;
}

template <class T>
unsigned __match_all_sync(unsigned mask, T value, int* predicate, Site site = Site::here()) {
  const MatchLane lane = match(mask, bits_of(value), "__match_all_sync", site);
  *predicate = lane.same == lane.present;
  return *predicate ? lane.present : 0;
}

// The lanes that are here together: as many as can be, since a lane waits until no other lane of its warp can run.
unsigned __activemask(Site site = Site::here());

template <class T, class Op>
struct ReduceWork {
  void operator()(T* const* lanes, unsigned present) const {
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

#define KF_SIMT_REDUCE(name, T, expression)                         \
  inline T name(unsigned mask, T value, Site site = Site::here()) { \
    struct Op {                                                     \
      T operator()(T a, T b) const { return expression; }           \
    };                                                              \
    warp_collective<ReduceWork<T, Op>>(#name, value, mask, site);   \
    return value;                                                   \
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
[[noreturn]] void kernel_error(const char* what, Site site);
inline void __trap(Site site = Site::here()) { kernel_error("__trap()", site); }
inline void __brkpt() {}

// What assert() calls. Outside of a kernel it ends the program, as usual.
[[noreturn]] void assert_failed(const char* expression, const char* file, unsigned line, const char* function);

// A thread that reads memory in a loop until another thread changes it must let the others run. Reads that return to
// one of the two places read last are such a loop; a stream of reads is not.
struct Poll {
  unsigned count;
  unsigned changed;  // this thread has changed memory since it last gave way
  const void* places[2];
};
extern __thread Poll poll_state;
void poll_yield();

inline void note_poll() {
  if (++poll_state.count >= 32) poll_yield();
}

inline void note_poll(const void* address) {
  Poll& p = poll_state;
  if (p.places[0] == address || p.places[1] == address) {
    note_poll();
  } else {
    p.places[1] = p.places[0];
    p.places[0] = address;
    p.count = 0;
  }
}

inline void note_change() { poll_state.changed = 1; }

inline void __threadfence() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
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
