// What instrumented kernels call.
//
// A kernel that was compiled with -fsanitize=thread calls __tsan_read4 and the like before each access; here they are
// ours. -fsanitize-coverage=trace-pc,trace-cmp makes it also call at each comparison and each basic block. The rest of
// the emulation is compiled without these flags.
//
// Where the environment's KF_SIMT_COUNT names a file, it gets the counts when the process ends. Who loads this as a
// library can have those of each call, by kf_simt_write_counts.
#include "access_counter.h"

#ifdef __clang__
#error counting needs g++ (CXX=g++): clang adds its calls to loops that it has vectorised, and joins what lanes do apart
#endif

namespace kf::simt {
namespace {

const Observer counting{
    [] { AccessCounter::mine().begin_block(); },
    [] { AccessCounter::mine().end_block(); },
    [](CallSite site) { AccessCounter::mine().pass_barrier(site); },
    [](CallSite site) { AccessCounter::mine().shuffle(site); },
    [](unsigned warp, unsigned lanes) { AccessCounter::mine().meet(warp, lanes); },
};

struct Start {
  Start() { observer = &counting; }
  ~Start() {
    if (const char* const path = std::getenv("KF_SIMT_COUNT")) AccessCounter::write(path);
  }
} start;

Address address_of(const volatile void* pointer) { return reinterpret_cast<Address>(pointer); }

inline void note(const void* pc, Kind kind, const volatile void* address, unsigned size,
                 Reading reading = Reading::kSure) {
  if (AccessCounter* const counter = AccessCounter::running())
    counter->access(address_of(pc), kind, reading, address_of(address), size);
}

// The largest piece that an instruction can move at once, up to 16 bytes: a power of two that divides address and size.
unsigned widest(Address address, std::size_t size) {
  const std::size_t both = address | size | 16;
  return static_cast<unsigned>(both & ~(both - 1));
}

void note_pieces(const void* pc, Kind kind, const void* address, std::size_t size, unsigned piece, Reading reading) {
  for (std::size_t at = 0; at < size; at += piece) {
    note(pc, kind, static_cast<const char*>(address) + at, piece, reading);
  }
}

// The compiler reports a structure in one piece if it is larger than 16 bytes, or no power of two, or less aligned than
// its size would need. In the last case its members are smaller, of 4 bytes most often. But where the emulation itself
// moves memory for an instruction, it is one access. Who reads the counts knows whose code it was.
void note_structure(const void* pc, Kind kind, const void* address, std::size_t size) {
  const unsigned piece = widest(address_of(address), size);
  if (piece != size || size == 1) {
    note_pieces(pc, kind, address, size, piece, Reading::kSure);
  } else {
    note_pieces(pc, kind, address, size, size > 4 ? 4 : piece / 2, Reading::kMembers);
    note_pieces(pc, kind, address, size, piece, Reading::kWhole);
  }
}

}  // namespace
}  // namespace kf::simt

// What instrumented code calls. `__builtin_return_address(0)` is the place that called.

#define KF_HERE __builtin_return_address(0)
using kf::simt::AccessCounter;
using kf::simt::Kind;

extern "C" {

// Writes what has been counted since the last call. No launch may be under way.
__attribute__((visibility("default"))) void kf_simt_write_counts(const char* path) {
  AccessCounter::write(path);
  AccessCounter::clear();
}

void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

void __tsan_func_entry(void* call) {
  if (AccessCounter* const counter = AccessCounter::running()) counter->enter(reinterpret_cast<std::uintptr_t>(call));
}
void __tsan_func_exit() {
  if (AccessCounter* const counter = AccessCounter::running()) counter->leave();
}

#define KF_ACCESS(size)                                                                          \
  void __tsan_read##size(void* address) { kf::simt::note(KF_HERE, Kind::kLoad, address, size); } \
  void __tsan_write##size(void* address) { kf::simt::note(KF_HERE, Kind::kStore, address, size); }
KF_ACCESS(1)
KF_ACCESS(2)
KF_ACCESS(4)
KF_ACCESS(8)
KF_ACCESS(16)

void __tsan_read_range(void* address, unsigned long size) {
  kf::simt::note_structure(KF_HERE, Kind::kLoad, address, size);
}
void __tsan_write_range(void* address, unsigned long size) {
  kf::simt::note_structure(KF_HERE, Kind::kStore, address, size);
}
// Atomics are done here, and counted. Their order is the strongest, whatever was asked for.
#define KF_FETCH(T, bits, name)                                             \
  T __tsan_atomic##bits##_fetch_##name(volatile T* address, T value, int) { \
    kf::simt::note(KF_HERE, Kind::kAtomic, address, sizeof(T));             \
    return __atomic_fetch_##name(address, value, __ATOMIC_SEQ_CST);         \
  }
#define KF_COMPARE_EXCHANGE(T, bits, name)                                                                     \
  int __tsan_atomic##bits##_compare_exchange_##name(volatile T* address, T* expected, T desired, int, int) {   \
    kf::simt::note(KF_HERE, Kind::kAtomic, address, sizeof(T));                                                \
    return __atomic_compare_exchange_n(address, expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }
#define KF_ATOMICS(T, bits)                                             \
  T __tsan_atomic##bits##_load(const volatile T* address, int) {        \
    kf::simt::note(KF_HERE, Kind::kAtomicLoad, address, sizeof(T));     \
    return __atomic_load_n(address, __ATOMIC_SEQ_CST);                  \
  }                                                                     \
  void __tsan_atomic##bits##_store(volatile T* address, T value, int) { \
    kf::simt::note(KF_HERE, Kind::kStore, address, sizeof(T));          \
    __atomic_store_n(address, value, __ATOMIC_SEQ_CST);                 \
  }                                                                     \
  T __tsan_atomic##bits##_exchange(volatile T* address, T value, int) { \
    kf::simt::note(KF_HERE, Kind::kAtomic, address, sizeof(T));         \
    return __atomic_exchange_n(address, value, __ATOMIC_SEQ_CST);       \
  }                                                                     \
  KF_FETCH(T, bits, add)                                                \
  KF_FETCH(T, bits, sub)                                                \
  KF_FETCH(T, bits, and)                                                \
  KF_FETCH(T, bits, or)                                                 \
  KF_FETCH(T, bits, xor)                                                \
  KF_COMPARE_EXCHANGE(T, bits, strong)                                  \
  KF_COMPARE_EXCHANGE(T, bits, weak)
KF_ATOMICS(std::uint8_t, 8)
KF_ATOMICS(std::uint16_t, 16)
KF_ATOMICS(std::uint32_t, 32)
KF_ATOMICS(std::uint64_t, 64)

void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_atomic_signal_fence(int) {}

void __sanitizer_cov_trace_pc() {
  if (AccessCounter* const counter = AccessCounter::running())
    counter->enter_basic_block(reinterpret_cast<std::uintptr_t>(KF_HERE));
}
#define KF_COMPARE(name, ...)                                      \
  void __sanitizer_cov_trace_##name(__VA_ARGS__) {                 \
    if (AccessCounter* const counter = AccessCounter::running())   \
      counter->compare(reinterpret_cast<std::uintptr_t>(KF_HERE)); \
  }
KF_COMPARE(cmp1, std::uint8_t, std::uint8_t)
KF_COMPARE(cmp2, std::uint16_t, std::uint16_t)
KF_COMPARE(cmp4, std::uint32_t, std::uint32_t)
KF_COMPARE(cmp8, std::uint64_t, std::uint64_t)
KF_COMPARE(const_cmp1, std::uint8_t, std::uint8_t)
KF_COMPARE(const_cmp2, std::uint16_t, std::uint16_t)
KF_COMPARE(const_cmp4, std::uint32_t, std::uint32_t)
KF_COMPARE(const_cmp8, std::uint64_t, std::uint64_t)
KF_COMPARE(cmpf, float, float)
KF_COMPARE(cmpd, double, double)
KF_COMPARE(switch, std::uint64_t, std::uint64_t*)

}  // extern "C"
