// Asynchronous copies: cp.async, mbarrier, cp.async.bulk, TMA.
//
// A copy may happen at any time between its start and the wait that covers it. Here it happens as late as it can, so
// that a missing wait shows: the memory still holds NaN or old data.
//   cp.async        when its thread executes the wait that covers it; if an mbarrier tracks it, as the next line
//   bulk loads      when a thread tests their mbarrier and the phase is not complete yet: that thread copies
//   bulk stores     when their thread executes the wait_group, or wait_group.read, that covers them. Hardware may write
//                   later than .read; but where a kernel ends right after it, as it may, there is no later moment here
//   st.async        as bulk loads; red.async at once
// Under the schedule `random` half of the copies happen at once, which shows writes into a buffer that is still read.
#pragma once

#include <algorithm>

#include "kf_simt/ptx.h"
#include "kf_simt/tensor_map.h"

namespace kf::simt::ptx {

// ---- what the runtime keeps (src/ptx.cpp) ----

// 4, 8 or 16 bytes, of which the first `given` are read and the rest become zero.
struct Copy {
  void* to;
  const void* from;
  std::uint8_t bytes, given;
};

enum class Reduction : std::uint8_t { kNone, kAdd, kMin, kMax, kAnd, kOr, kXor, kIncrement, kDecrement };
enum class Element : std::uint8_t {
  kByte,
  kUnsigned32,
  kSigned32,
  kUnsigned64,
  kSigned64,
  kFloat16,
  kBfloat16,
  kFloat32,
  kFloat64,
};

// A copy between global and shared memory that one thread starts and that goes on without it.
struct Transfer {
  enum Kind : std::uint8_t { kLoad, kStore, kLoadTensor, kStoreTensor, kValue, kCopy, kArrive };

  Transfer(Kind kind_ = kArrive, unsigned bytes_ = 0, void* shared_ = nullptr, void* other_ = nullptr)
      : kind(kind_), bytes(bytes_), shared(shared_), other(other_) {}

  Kind kind;
  Reduction reduction = Reduction::kNone;
  Element element = Element::kByte;
  unsigned bytes;  // what the mbarrier counts
  void* shared;
  void* other;  // global memory; of a load also shared memory
  std::int32_t coordinates[5] = {};
  union {
    TensorMap map;
    std::uint8_t value[16];
    Copy copy;
  };
};

// The running thread's copies, in groups: note, close the group, and take those that no more than `keep` newer groups
// follow.
constexpr unsigned kAll = ~0u;  // with this for `keep`, also those of the group that is open
void note_copy(const Copy& copy);
void close_copies();
bool next_copy(unsigned keep, Copy& copy);
void note_store(const Transfer& store);
void close_stores();
bool next_store(unsigned keep, Transfer& store);

// Transfers that an mbarrier waits for.
void note_transfer(const void* barrier, const Transfer& transfer);
bool next_transfer(const void* barrier, Transfer& transfer);
void forget_transfers(const void* barrier);
// All copies of the running thread become transfers of this mbarrier.
void hand_over_copies(const void* barrier);

// Whether a copy that is started now happens at once.
bool happens_now();

// ---- cp.async ----

inline void carry_out(const Copy& copy) {
  alignas(16) unsigned char bytes[16] = {};
  const auto move = [&](auto word) {
    if (copy.given == sizeof(word)) {
      std::memcpy(bytes, copy.from, sizeof(word));
    } else {
      for (unsigned i = 0; i < copy.given; ++i) bytes[i] = static_cast<const unsigned char*>(copy.from)[i];
    }
    std::memcpy(copy.to, bytes, sizeof(word));
  };
  struct Four {
    std::uint64_t words[2];
  };
  if (copy.bytes == 4) return move(std::uint32_t{});
  if (copy.bytes == 8) return move(std::uint64_t{});
  move(Four{});
}

inline void copy_async(void* to, const void* from, unsigned bytes, unsigned given, bool cached,
                       CallSite site = CallSite::here()) {
  if (bytes != 16 && (!cached || (bytes != 4 && bytes != 8))) {
    failure(site, "cp.async of %u bytes; .cg copies 16, .ca 4, 8 or 16", bytes);
  }
  if (given > bytes) failure(site, "cp.async reads %u bytes and writes only %u", given, bytes);
  check_aligned(to, bytes, "cp.async", site);
  check_aligned(from, bytes, "cp.async", site);
  const Copy copy{to, from, static_cast<std::uint8_t>(bytes), static_cast<std::uint8_t>(given)};
  if (happens_now()) {
    carry_out(copy);
  } else {
    note_copy(copy);
  }
}
inline void wait_copies(unsigned keep) {
  Copy copy;
  while (next_copy(keep, copy)) carry_out(copy);
}

// ---- mbarrier ----

// The 64 bits of an mbarrier here: arrivals still expected in this phase (20 bits), arrivals of a phase (20), bytes
// expected and not yet there (21, signed), the phase's parity, and a mark that tells it from other memory.
constexpr unsigned kBarrierLimit = (1u << 20) - 1;
constexpr std::uint64_t kBarrierMark = std::uint64_t{1} << 62;
struct BarrierChange {
  unsigned arrive = 0;     // arrivals
  std::int64_t bytes = 0;  // expected
  bool drop = false;       // the arrivals are expected in no later phase either
  unsigned expect = 0;     // arrivals more in this phase
};
// Gives the state before. When nothing is expected any more the next phase begins.
std::uint64_t change_barrier(void* address, const BarrierChange& change, CallSite site);
// The parity of the phase that is not complete.
unsigned barrier_phase(const void* address, CallSite site);

inline void barrier_init(void* address, unsigned count, CallSite site = CallSite::here()) {
  check_aligned(address, 8, "mbarrier.init", site);
  if (count == 0 || count > kBarrierLimit) failure(site, "mbarrier.init with the count %u", count);
  forget_transfers(address);
  *static_cast<std::uint64_t*>(address) = kBarrierMark | std::uint64_t{count} << 20 | count;
  note_change();
}
inline void barrier_invalidate(void* address, CallSite site = CallSite::here()) {
  check_aligned(address, 8, "mbarrier.inval", site);
  forget_transfers(address);
  *static_cast<std::uint64_t*>(address) = 0;
}

// An arrival releases what the thread did; a wait that ends acquires it.
inline std::uint64_t barrier_arrive(void* address, unsigned count, unsigned bytes, bool drop,
                                    CallSite site = CallSite::here()) {
  note_read(address, 8);
  order_release(address);
  return change_barrier(address, {count, bytes, drop}, site);
}
inline void barrier_expect_tx(void* address, unsigned bytes, CallSite site = CallSite::here()) {
  note_read(address, 8);
  change_barrier(address, {0, bytes}, site);
}
inline void barrier_complete_tx(void* address, unsigned bytes, CallSite site = CallSite::here()) {
  note_read(address, 8);
  order_release(address);
  change_barrier(address, {0, -std::int64_t{bytes}}, site);
}
inline unsigned barrier_pending(std::uint64_t state) { return static_cast<unsigned>(state) & kBarrierLimit; }

void carry_out(const Transfer& transfer, CallSite site);

// True when the phase of this parity is complete. Otherwise the transfers that it waits for happen now; and if that was
// not enough, others may run before the answer is false.
inline bool barrier_try_parity(void* address, unsigned parity, CallSite site = CallSite::here()) {
  note_read(address, 8);
  const auto complete = [&] {
    if (barrier_phase(address, site) == (parity & 1)) return false;
    order_acquire(address);
    return true;
  };
  if (complete()) return true;
  Transfer transfer;
  bool any = false;
  while (next_transfer(address, transfer)) {
    any = true;
    order_acquire(address);  // what the thread that started it did comes before
    carry_out(transfer, site);
    order_release(address);
    change_barrier(address, {transfer.kind == Transfer::kArrive, -std::int64_t{transfer.bytes}}, site);
  }
  if (any && complete()) return true;
  poll_yield();
  return false;
}
inline bool barrier_try(void* address, std::uint64_t state, CallSite site = CallSite::here()) {
  return barrier_try_parity(address, static_cast<unsigned>(state >> 61) & 1, site);
}

// cp.async.mbarrier.arrive: one arrival when all copies of this thread have happened. `counted`: the barrier's count
// does not include it, so it grows by one until then.
inline void copies_arrive(void* address, bool counted, CallSite site = CallSite::here()) {
  note_read(address, 8);
  order_release(address);
  if (counted) change_barrier(address, {0, 0, false, 1}, site);
  hand_over_copies(address);
  note_transfer(address, Transfer());
}

// ---- bulk copies ----

// Starts a transfer that the mbarrier waits for.
inline void start(void* barrier, const Transfer& transfer, CallSite site) {
  check_aligned(barrier, 8, "an mbarrier", site);
  note_read(barrier, 8);
  order_release(barrier);
  if (happens_now()) {
    carry_out(transfer, site);
    order_release(barrier);
    change_barrier(barrier, {0, -std::int64_t{transfer.bytes}}, site);
  } else {
    note_transfer(barrier, transfer);
    note_change();
  }
}

// Blocks of the cluster whose shared memory is written: a bit for each, or the block that the addresses name.
constexpr unsigned kOwnBlock = 1u << 16;
inline void start_each(Transfer& transfer, void* barrier, unsigned blocks, CallSite site) {
  if (blocks == kOwnBlock) return start(barrier, transfer, site);
  void* const shared = transfer.shared;
  for (unsigned rank = 0; rank < 16; ++rank) {
    if (!(blocks >> rank & 1)) continue;
    transfer.shared = map_shared_rank(shared, rank);
    start(map_shared_rank(barrier, rank), transfer, site);
  }
}

inline void check_bulk(const void* a, const void* b, unsigned bytes, CallSite site) {
  check_aligned(a, 16, "cp.async.bulk", site);
  check_aligned(b, 16, "cp.async.bulk", site);
  if (bytes % 16 != 0) failure(site, "cp.async.bulk of %u bytes, which is not a multiple of 16", bytes);
}

inline void load_bulk(void* to, const void* from, unsigned bytes, void* barrier, unsigned blocks,
                      CallSite site = CallSite::here()) {
  check_bulk(to, from, bytes, site);
  Transfer transfer{Transfer::kLoad, bytes, to, const_cast<void*>(from)};
  start_each(transfer, barrier, blocks, site);
}

inline void start_store(const Transfer& transfer, CallSite site) {
  if (happens_now()) {
    carry_out(transfer, site);
  } else {
    note_store(transfer);
  }
}
inline void store_bulk(void* to, const void* from, unsigned bytes, Reduction reduction, Element element,
                       CallSite site = CallSite::here()) {
  check_bulk(to, from, bytes, site);
  Transfer transfer(Transfer::kStore, bytes, const_cast<void*>(from), to);
  transfer.reduction = reduction;
  transfer.element = element;
  start_store(transfer, site);
}
inline void wait_bulk(unsigned keep, CallSite site = CallSite::here()) {
  Transfer store;
  while (next_store(keep, store)) carry_out(store, site);
}

// The tensor map that a kernel names, checked for what the instruction needs.
TensorMap tensor_map_at(const void* address, int rank, CallSite site);

template <std::size_t N>
Transfer tensor_transfer(Transfer::Kind kind, void* shared, const void* map, const std::array<std::int32_t, N>& at,
                         CallSite site) {
  Transfer transfer{kind, 0, shared};
  transfer.map = tensor_map_at(map, static_cast<int>(N), site);
  transfer.bytes = transfer.map.rows() * transfer.map.row_bytes();
  std::copy(at.begin(), at.end(), transfer.coordinates);
  // An H200 stops at both with "an illegal instruction was encountered".
  if (std::int64_t{at[0]} * transfer.map.element_bytes() % 16 != 0) {
    failure(site, "a TMA copy at element %d of the innermost dimension, which is no multiple of 16 bytes", at[0]);
  }
  if (kind == Transfer::kStoreTensor && *std::min_element(at.begin(), at.end()) < 0) {
    failure(site, "a TMA copy out of shared memory with a coordinate below 0: only copies into it may begin there");
  }
  check_aligned(shared, 128, "a TMA copy", site);
  return transfer;
}

template <std::size_t N>
void load_tensor(void* to, const void* map, const std::array<std::int32_t, N>& at, void* barrier, unsigned blocks,
                 CallSite site = CallSite::here()) {
  Transfer transfer = tensor_transfer(Transfer::kLoadTensor, to, map, at, site);
  start_each(transfer, barrier, blocks, site);
}
template <std::size_t N>
void store_tensor(const void* map, const std::array<std::int32_t, N>& at, void* from, Reduction reduction,
                  CallSite site = CallSite::here()) {
  Transfer transfer = tensor_transfer(Transfer::kStoreTensor, from, map, at, site);
  constexpr Element kElements[] = {Element::kByte,       Element::kByte,     Element::kUnsigned32, Element::kSigned32,
                                   Element::kUnsigned64, Element::kSigned64, Element::kFloat16,    Element::kFloat32,
                                   Element::kFloat64,    Element::kBfloat16, Element::kFloat32,    Element::kFloat32,
                                   Element::kFloat32};
  transfer.reduction = reduction;
  transfer.element = kElements[transfer.map.type];
  if (reduction != Reduction::kNone && transfer.element == Element::kByte) {
    failure(site, "a reduction into a tensor of 8-bit or 16-bit integers");
  }
  start_store(transfer, site);
}

// st.async: a value for another block's shared memory, counted by an mbarrier there.
template <class T, std::size_t N>
void store_async(void* to, const std::array<T, N>& values, void* barrier, CallSite site = CallSite::here()) {
  check_aligned(to, sizeof(T) * N, "st.async", site);
  Transfer transfer{Transfer::kValue, sizeof(T) * N, to};
  std::memcpy(transfer.value, values.data(), sizeof(T) * N);
  start(barrier, transfer, site);
}
template <class Operation, class T>
void async_reduce(void* to, T value, void* barrier, CallSite site = CallSite::here()) {
  atomic<Operation, T>(to, std::array<T, 1>{{value}}, Order::kRelaxed, site);
  barrier_complete_tx(barrier, sizeof(T), site);
}

// ---- how a transfer happens: plain accesses in the thread that carries it out ----

// One element; H is its type where T has only the bits of it.
template <class T, class H = void>
void reduce_one(void* to, const unsigned char* from, Reduction reduction, CallSite site) {
  std::array<T, 1> value;
  std::memcpy(value.data(), from, sizeof(T));
  const auto with = [&](auto operation) {
    using Operation = decltype(operation);
    using Of = std::conditional_t<std::is_void_v<H>, Operation, AtomicHalf<H, 1, Operation>>;
    static_cast<void>(atomic<Of, T>(to, value, Order::kRelaxed, site));
  };
  if (reduction == Reduction::kAdd) return with(AtomicAdd());
  if (reduction == Reduction::kMin) return with(AtomicMin());
  if (reduction == Reduction::kMax) return with(AtomicMax());
  if constexpr (std::is_integral_v<T> && std::is_void_v<H>) {
    if (reduction == Reduction::kAnd) return with(AtomicAnd());
    if (reduction == Reduction::kOr) return with(AtomicOr());
    if (reduction == Reduction::kXor) return with(AtomicXor());
    if (reduction == Reduction::kIncrement) return with(AtomicIncrement());
    if (reduction == Reduction::kDecrement) return with(AtomicDecrement());
  }
  failure(site, "a reduction that its type does not have");
}

// Adds, or whatever the reduction is, `bytes` bytes of elements.
inline void reduce_elements(void* to, const unsigned char* from, unsigned bytes, Reduction reduction, Element element,
                            CallSite site) {
  const auto each = [&](unsigned size, auto one) {
    for (unsigned i = 0; i < bytes; i += size) one(static_cast<unsigned char*>(to) + i, from + i, reduction, site);
  };
  switch (element) {
    case Element::kUnsigned32: return each(4, reduce_one<std::uint32_t>);
    case Element::kSigned32: return each(4, reduce_one<std::int32_t>);
    case Element::kUnsigned64: return each(8, reduce_one<std::uint64_t>);
    case Element::kSigned64: return each(8, reduce_one<std::int64_t>);
    case Element::kFloat32: return each(4, reduce_one<float>);
    case Element::kFloat64: return each(8, reduce_one<double>);
    case Element::kFloat16: return each(2, reduce_one<std::uint16_t, F16>);
    case Element::kBfloat16: return each(2, reduce_one<std::uint16_t, BF16>);
    case Element::kByte: break;
  }
}

// The element that a box holds for places outside of the tensor. Which NaN hardware takes is not documented.
inline void fill_outside(const TensorMap& map, unsigned char* element) {
  const unsigned bytes = map.element_bytes();
  std::memset(element, map.fill_nan ? 0xff : 0, bytes);
  if (map.fill_nan) element[bytes - 1] = 0x7f;
}

// A box between shared and global memory, row by row, in chunks of 16 bytes, which are what a swizzle moves.
inline void carry_out_tensor(const Transfer& transfer, CallSite site) {
  const TensorMap& map = transfer.map;
  const unsigned element = map.element_bytes(), row_bytes = map.row_bytes();
  const unsigned base = kf_shared_address(transfer.shared) & 0xffffffu;
  const bool store = transfer.kind == Transfer::kStoreTensor;
  unsigned index[5] = {};
  for (unsigned row = 0; row < map.rows(); ++row) {
    bool inside = true;
    std::uint64_t offset = 0;
    for (int d = 1; d < map.rank; ++d) {
      const std::int64_t at = std::int64_t{transfer.coordinates[d]} + std::int64_t{index[d]} * map.step[d];
      inside = inside && at >= 0 && static_cast<std::uint64_t>(at) < map.size[d];
      if (inside) offset += static_cast<std::uint64_t>(at) * map.stride[d - 1];
    }
    unsigned char* const global = reinterpret_cast<unsigned char*>(map.address + offset);
    for (unsigned at = 0; at < row_bytes; at += 16) {
      const unsigned linear = base + row * row_bytes + at;
      unsigned char* const chunk =
          static_cast<unsigned char*>(transfer.shared) + (swizzled(linear, map.swizzle) - base);
      const std::int64_t first = transfer.coordinates[0] + static_cast<std::int64_t>(at / element);
      const unsigned elements = 16 / element;
      const bool whole = inside && first >= 0 && static_cast<std::uint64_t>(first) + elements <= map.size[0];
      unsigned char bytes[16];
      if (store) std::memcpy(bytes, chunk, 16);
      for (unsigned i = 0; i < (whole ? 1 : elements); ++i) {
        const std::int64_t x = first + i;
        const bool in = whole || (inside && x >= 0 && static_cast<std::uint64_t>(x) < map.size[0]);
        const unsigned size = whole ? 16 : element;
        unsigned char* const there = global + (in ? static_cast<std::uint64_t>(x) * element : 0);
        unsigned char* const here = bytes + i * element;
        if (!store && !in) {
          fill_outside(map, here);
        } else if (!store) {
          whole ? std::memcpy(here, there, 16) : std::memcpy(here, there, size);
        } else if (in && transfer.reduction != Reduction::kNone) {
          reduce_elements(there, here, size, transfer.reduction, transfer.element, site);
        } else if (in) {
          whole ? std::memcpy(there, here, 16) : std::memcpy(there, here, size);
        }
      }
      if (!store) std::memcpy(chunk, bytes, 16);
    }
    for (int d = 1; d < map.rank && ++index[d] == map.count(d); ++d) index[d] = 0;
  }
}

inline void carry_out(const Transfer& transfer, CallSite site) {
  auto* const shared = static_cast<unsigned char*>(transfer.shared);
  auto* const other = static_cast<unsigned char*>(transfer.other);
  switch (transfer.kind) {
    case Transfer::kLoad:
      for (unsigned i = 0; i < transfer.bytes; i += 16) std::memcpy(shared + i, other + i, 16);
      break;
    case Transfer::kStore:
      for (unsigned i = 0; i < transfer.bytes; i += 16) {
        unsigned char bytes[16];
        std::memcpy(bytes, shared + i, 16);
        if (transfer.reduction == Reduction::kNone) {
          std::memcpy(other + i, bytes, 16);
        } else {
          reduce_elements(other + i, bytes, 16, transfer.reduction, transfer.element, site);
        }
      }
      break;
    case Transfer::kLoadTensor:
    case Transfer::kStoreTensor: carry_out_tensor(transfer, site); break;
    case Transfer::kValue:
      switch (transfer.bytes) {
        case 4: std::memcpy(shared, transfer.value, 4); break;
        case 8: std::memcpy(shared, transfer.value, 8); break;
        default: std::memcpy(shared, transfer.value, 16);
      }
      break;
    case Transfer::kCopy: carry_out(transfer.copy); break;
    case Transfer::kArrive: break;
  }
  note_change();
}

}  // namespace kf::simt::ptx
