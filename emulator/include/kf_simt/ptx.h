// What inline PTX becomes: ptx.py turns each instruction into a call of a function of this namespace. This file holds
// memory and warp operations; the others registers, arithmetic, matrices, asynchronous copies and warpgroups.
//
// Memory is touched by plain C++ in the lane that the instruction belongs to, so that sanitizers see it.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>

#include "kf_simt/atomics.h"
#include "kf_simt/device.h"
#include "kf_simt/ptx_arithmetic.h"

namespace kf::simt::ptx {

// ---- special registers ----

inline unsigned thread_index() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
inline unsigned warp_id() { return thread_index() / warpSize; }
inline unsigned warps() { return (blockDim.x * blockDim.y * blockDim.z + warpSize - 1) / warpSize; }
unsigned sm_id();  // blocks go round the SMs
unsigned sm_count();
std::uint64_t grid_id();
unsigned dynamic_shared_bytes();
std::uint64_t global_timer();  // ns

// ---- addresses ----

// A generic or global address is a pointer; one in shared memory is what __cvta_generic_to_shared gives.
inline void* generic(std::uint64_t address) { return reinterpret_cast<void*>(address); }
inline void* shared(std::uint64_t address) { return kf_shared_pointer(static_cast<unsigned>(address)); }
inline unsigned to_shared(std::uint64_t address) { return kf_shared_address(generic(address)); }
// The rank of the block in whose shared memory this address lies.
inline unsigned rank_of(unsigned address) { return address >> 24 == 0 ? kf_cluster_rank() : (address >> 24) - 1; }

// Ends the launch with an Error: kernel_error with a text made as printf makes it.
[[noreturn, gnu::format(printf, 2, 3)]] void failure(CallSite site, const char* format, ...);

inline void check_aligned(const void* address, unsigned bytes, const char* what, CallSite site) {
  if (__builtin_expect((reinterpret_cast<std::uintptr_t>(address) & (bytes - 1)) != 0, 0)) {
    failure(site, "%s uses the address %p, which is not a multiple of %u", what, address, bytes);
  }
}

// ---- loads and stores ----

// A register of 128 bits. It is loaded and stored at once, which few processors do: a lock stands in for that.
using Bits128 = unsigned __int128;
Bits128 load_wide(const void* address);
void store_wide(void* address, Bits128 value);

enum class Order { kPlain, kRelaxed, kAcquire, kRelease, kBoth };
template <class T>
using Bits = std::conditional_t<
    sizeof(T) == 8, std::uint64_t,
    std::conditional_t<sizeof(T) == 4, std::uint32_t, std::conditional_t<sizeof(T) == 2, std::uint16_t, std::uint8_t>>>;

template <class T, std::size_t N>
struct alignas(sizeof(T) * N) Whole {
  T parts[N];
};

template <class T, int N>
std::array<T, N> load(const void* address, Order order, CallSite site = CallSite::here()) {
  check_aligned(address, sizeof(T) * N, "a load", site);
  std::array<T, N> values;
  if (order == Order::kPlain) {
    const auto whole = *static_cast<const Whole<T, N>*>(address);
    std::memcpy(values.data(), &whole, sizeof(whole));
    return values;
  }
  // Messages of 16 bytes and sums of 8 are polled many at a time.
  if constexpr (sizeof(T) >= 8) {
    note_poll();
  } else {
    note_poll(address);
  }
  if constexpr (sizeof(T) == 16) {
    const auto* const halves = static_cast<const std::uint64_t*>(address);
    for (int i = 0; i < 2; ++i) (void)__atomic_load_n(halves + i, __ATOMIC_RELAXED);  // for a race detector
    values[0] = load_wide(address);
  } else {
    for (int i = 0; i < N; ++i) {
      const auto* const from = static_cast<const Bits<T>*>(address) + i;
      values[i] = as<T>(order == Order::kAcquire ? __atomic_load_n(from, __ATOMIC_ACQUIRE)
                                                 : __atomic_load_n(from, __ATOMIC_RELAXED));
    }
  }
  return values;
}

template <class T, std::size_t N>
void store(void* address, const std::array<T, N>& values, Order order, CallSite site = CallSite::here()) {
  check_aligned(address, sizeof(T) * N, "a store", site);
  if (order == Order::kPlain) {
    Whole<T, N> whole;
    std::memcpy(&whole, values.data(), sizeof(whole));
    *static_cast<Whole<T, N>*>(address) = whole;
    return;
  }
  if constexpr (sizeof(T) == 16) {
    auto* const halves = static_cast<std::uint64_t*>(address);
    for (int i = 0; i < 2; ++i) (void)__atomic_fetch_or(halves + i, 0, __ATOMIC_RELAXED);  // for a race detector
    store_wide(address, values[0]);
  } else {
    for (std::size_t i = 0; i < N; ++i) {
      auto* const to = static_cast<Bits<T>*>(address) + i;
      if (order == Order::kRelease) {
        __atomic_store_n(to, as<Bits<T>>(values[i]), __ATOMIC_RELEASE);
      } else {
        __atomic_store_n(to, as<Bits<T>>(values[i]), __ATOMIC_RELAXED);
      }
    }
  }
  note_change();
}

// ---- atomics ----

using AtomicAdd = Add;
using AtomicMin = Min;
using AtomicMax = Max;
using AtomicAnd = std::bit_and<>;
using AtomicOr = std::bit_or<>;
using AtomicXor = std::bit_xor<>;
struct AtomicExchange {
  template <class T>
  T operator()(T, T b) const {
    return b;
  }
};
struct AtomicIncrement {
  template <class T>
  T operator()(T a, T b) const {
    return a >= b ? T{0} : static_cast<T>(a + 1);
  }
};
struct AtomicDecrement {
  template <class T>
  T operator()(T a, T b) const {
    return a == 0 || a > b ? b : static_cast<T>(a - 1);
  }
};
template <class H, int N, class Operation>
struct AtomicHalf {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(half_op<H, N>(Operation(), a, b));
  }
};

// GCC's builtins want the order as a constant; a race detector takes it for what it is.
template <class B>
bool exchange_if_same(B* word, B* expected, B desired, Order order) {
  switch (order) {
    case Order::kAcquire:
      return __atomic_compare_exchange_n(word, expected, desired, false, __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE);
    case Order::kRelease:
      return __atomic_compare_exchange_n(word, expected, desired, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
    case Order::kBoth:
      return __atomic_compare_exchange_n(word, expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    default: return __atomic_compare_exchange_n(word, expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  }
}

// Each element is one atomic operation. Gives the old values.
template <class Operation, class T, std::size_t N>
std::array<T, N> atomic(void* address, const std::array<T, N>& values, Order order, CallSite site = CallSite::here()) {
  check_aligned(address, sizeof(T) * N, "an atomic operation", site);
  std::array<T, N> old;
  for (std::size_t i = 0; i < N; ++i) {
    auto* const word = static_cast<Bits<T>*>(address) + i;
    Bits<T> before = __atomic_load_n(word, __ATOMIC_RELAXED), after;
    do {
      after = as<Bits<T>>(static_cast<T>(Operation()(as<T>(before), values[i])));
    } while (!exchange_if_same(word, &before, after, order));
    old[i] = as<T>(before);
    note_atomic(word, before != after);
  }
  return old;
}
template <class T>
T compare_and_swap(void* address, T compare, T value, Order order, CallSite site = CallSite::here()) {
  check_aligned(address, sizeof(T), "an atomic operation", site);
  T old = compare;
  exchange_if_same(static_cast<T*>(address), &old, value, order);
  note_atomic(address, old == compare && compare != value);
  return old;
}

// ---- warps and barriers ----

enum class Shuffle { kUp, kDown, kXor, kIndex };
struct Shuffled {
  std::uint32_t value;
  bool inside;  // the source lies in the lane's segment; otherwise the value is the lane's own
};
// `control`: bits 0 to 4 the greatest lane (for kUp the least), bits 8 to 12 the bits of a lane that name its segment.
inline Shuffled shuffle_lanes(Shuffle mode, std::uint32_t value, std::uint32_t b, std::uint32_t control, unsigned mask,
                              CallSite site = CallSite::here()) {
  const unsigned lane = kf_lane_id(), clamp = control & 31, segment = control >> 8 & 31;
  const unsigned limit = (lane & segment) | (clamp & ~segment);
  b &= 31;
  const unsigned source = mode == Shuffle::kUp     ? lane - b
                          : mode == Shuffle::kDown ? lane + b
                          : mode == Shuffle::kXor  ? lane ^ b
                                                   : (lane & segment) | (b & ~segment);
  const bool inside = mode == Shuffle::kUp ? static_cast<int>(source) >= static_cast<int>(limit) : source <= limit;
  return {shuffle_from(value, static_cast<int>(inside ? source : lane), mask, "shfl.sync", site), inside};
}

// An operation of whole warps: Work{}(lanes) is called once, with the records of all 32 lanes.
template <class Work, class Lane>
struct WholeWarp {
  struct Record {
    Lane* lane;
    bool whole;
  };
  KF_SIMT_UNINSTRUMENTED void operator()(Record* const* records, unsigned present) const {
    const bool whole = present == ~0u;
    Lane* lanes[warpSize];
    for (int i = 0; i < warpSize; ++i) {
      if (!(present >> i & 1)) continue;
      lanes[i] = records[i]->lane;
      records[i]->whole = whole;
    }
    if (whole) Work{}(lanes);
  }
};
template <class Work, class Lane>
void whole_warp(const char* name, Lane& lane, CallSite site) {
  typename WholeWarp<Work, Lane>::Record record{&lane, false};
  warp_collective<WholeWarp<Work, Lane>>(name, record, ~0u, site);
  if (!record.whole) failure(site, "%s needs all 32 lanes of the warp, and some are not there", name);
}

// The lowest of the lanes that are there.
inline unsigned elected(unsigned mask, CallSite site = CallSite::here()) {
  return static_cast<unsigned>(__builtin_ctz(ballot(mask, true, "elect.sync", nullptr, site)));
}

// bar.sync, bar.arrive. threads 0: all of the block.
inline void barrier(unsigned id, unsigned threads, bool wait, CallSite site = CallSite::here()) {
  if (id == 0 && wait && threads == 0) {
    block_barrier(BarrierVote::kNone, 0, site);
  } else {
    named_barrier(id, threads == 0 ? blockDim.x * blockDim.y * blockDim.z : threads, wait, site);
  }
}

}  // namespace kf::simt::ptx

#include "kf_simt/ptx_async.h"
#include "kf_simt/ptx_matrix.h"
#include "kf_simt/ptx_wgmma.h"
