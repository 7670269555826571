// What instrumented kernels call.
//
// A kernel that was compiled with -fsanitize=thread calls __tsan_read4 and the like before each access; here they are
// ours. -fsanitize-coverage=trace-pc,trace-cmp makes it also call at each comparison and each basic block. The rest of
// the emulation is compiled without these flags.
//
// Where the environment's KF_SIMT_COUNT names a file, it gets the counts when the process ends. Who loads this as a
// library can have those of each call, by kf_simt_write_counts.
#ifdef KF_SIMT_TRACE
#include "../trace/tracer.h"
#else
#include "access_counter.h"
#endif

#ifdef __clang__
#error counting needs g++ (CXX=g++): clang adds its calls to loops that it has vectorised, and joins what lanes do apart
#endif

namespace kf::simt {
namespace {

#ifdef KF_SIMT_TRACE
using Tool = Tracer;  // each access is written down
#else
using Tool = AccessCounter;
#endif

struct Start {
  Start() { observer = &Tool::kObserver; }
  ~Start() { Tool::end(); }
} start;

Address address_of(const volatile void* pointer) { return reinterpret_cast<Address>(pointer); }

inline void note(const void* pc, Kind kind, const volatile void* address, unsigned size) {
  if (Tool* const tool = Tool::running()) {
    tool->access(address_of(pc), kind, Reading::kSure, address_of(address), size);
  }
}

}  // namespace
}  // namespace kf::simt

// What instrumented code calls. `__builtin_return_address(0)` is the place that called.

#define KF_HERE __builtin_return_address(0)
using kf::simt::Kind;
using kf::simt::Tool;

extern "C" {

#ifndef KF_SIMT_TRACE
// Writes what has been counted since the last call. No launch may be under way.
__attribute__((visibility("default"))) void kf_simt_write_counts(const char* path) {
  kf::simt::AccessCounter::write(path);
  kf::simt::AccessCounter::clear();
}
#endif

void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

void __tsan_func_entry(void* call) {
  if (Tool* const tool = Tool::running()) tool->enter(reinterpret_cast<std::uintptr_t>(call));
}
void __tsan_func_exit() {
  if (Tool* const tool = Tool::running()) tool->leave();
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
  if (Tool* const tool = Tool::running())
    tool->access_range(kf::simt::address_of(KF_HERE), Kind::kLoad, kf::simt::address_of(address), size);
}
void __tsan_write_range(void* address, unsigned long size) {
  if (Tool* const tool = Tool::running())
    tool->access_range(kf::simt::address_of(KF_HERE), Kind::kStore, kf::simt::address_of(address), size);
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
  if (Tool* const tool = Tool::running()) tool->enter_basic_block(reinterpret_cast<std::uintptr_t>(KF_HERE));
}
#define KF_COMPARE(name, ...)                                                                         \
  void __sanitizer_cov_trace_##name(__VA_ARGS__) {                                                    \
    if (Tool* const tool = Tool::running()) tool->compare(reinterpret_cast<std::uintptr_t>(KF_HERE)); \
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
