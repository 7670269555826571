// Atomic functions. All are relaxed, as on a GPU: only barriers and fences order other memory.
#pragma once

#include <cstring>

#include "kf_simt/device.h"

namespace kf::simt {

// An atomic that leaves memory as it was is what a waiting thread does again and again.
inline void note_atomic(const void* address, bool changed) {
  if (changed) {
    note_change();
  } else {
    note_poll(address);
  }
}

// Replaces *address by update(*address) and returns the old value. `Bits` is an integer of T's size.
template <class Bits, class T, class Update>
T atomic_update(T* address, Update update) {
  static_assert(sizeof(Bits) == sizeof(T), "");
  Bits* const word = reinterpret_cast<Bits*>(address);
  Bits old_bits = __atomic_load_n(word, __ATOMIC_RELAXED);
  for (;;) {
    T old;
    std::memcpy(static_cast<void*>(&old), &old_bits, sizeof(T));
    const T next = update(old);
    Bits next_bits;
    std::memcpy(&next_bits, &next, sizeof(T));
    if (__atomic_compare_exchange_n(word, &old_bits, next_bits, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
      note_atomic(address, old_bits != next_bits);
      return old;
    }
  }
}

#define KF_SIMT_ATOMIC_SCOPES(T, name)                                        \
  inline T name##_block(T* address, T value) { return name(address, value); } \
  inline T name##_system(T* address, T value) { return name(address, value); }
#define KF_SIMT_ATOMIC_FETCH(T, name, builtin, changed)      \
  inline T name(T* address, T value) {                       \
    const T old = builtin(address, value, __ATOMIC_RELAXED); \
    note_atomic(address, changed);                           \
    return old;                                              \
  }                                                          \
  KF_SIMT_ATOMIC_SCOPES(T, name)
#define KF_SIMT_ATOMIC_UPDATE(T, Bits, name, next)                             \
  inline T name(T* address, T value) {                                         \
    return atomic_update<Bits>(address, [value](T old) -> T { return next; }); \
  }                                                                            \
  KF_SIMT_ATOMIC_SCOPES(T, name)
#define KF_SIMT_ATOMIC_CAS(T)                                                                             \
  inline T atomicCAS(T* address, T compare, T value) {                                                    \
    T old = compare;                                                                                      \
    __atomic_compare_exchange_n(address, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);         \
    note_atomic(address, old == compare && compare != value);                                             \
    return old;                                                                                           \
  }                                                                                                       \
  inline T atomicCAS_block(T* address, T compare, T value) { return atomicCAS(address, compare, value); } \
  inline T atomicCAS_system(T* address, T compare, T value) { return atomicCAS(address, compare, value); }
#define KF_SIMT_ATOMIC_INTEGER(T)                                              \
  KF_SIMT_ATOMIC_FETCH(T, atomicAdd, __atomic_fetch_add, value != 0)           \
  KF_SIMT_ATOMIC_FETCH(T, atomicExch, __atomic_exchange_n, old != value)       \
  KF_SIMT_ATOMIC_FETCH(T, atomicAnd, __atomic_fetch_and, (old & value) != old) \
  KF_SIMT_ATOMIC_FETCH(T, atomicOr, __atomic_fetch_or, (old | value) != old)   \
  KF_SIMT_ATOMIC_FETCH(T, atomicXor, __atomic_fetch_xor, value != 0)           \
  KF_SIMT_ATOMIC_UPDATE(T, T, atomicMin, value < old ? value : old)            \
  KF_SIMT_ATOMIC_UPDATE(T, T, atomicMax, value > old ? value : old)            \
  KF_SIMT_ATOMIC_CAS(T)

KF_SIMT_ATOMIC_INTEGER(int)
KF_SIMT_ATOMIC_INTEGER(unsigned)
KF_SIMT_ATOMIC_INTEGER(unsigned long long)
KF_SIMT_ATOMIC_UPDATE(long long, long long, atomicMin, value < old ? value : old)
KF_SIMT_ATOMIC_UPDATE(long long, long long, atomicMax, value > old ? value : old)
KF_SIMT_ATOMIC_CAS(unsigned short)
KF_SIMT_ATOMIC_FETCH(int, atomicSub, __atomic_fetch_sub, value != 0)
KF_SIMT_ATOMIC_FETCH(unsigned, atomicSub, __atomic_fetch_sub, value != 0)
KF_SIMT_ATOMIC_UPDATE(unsigned, unsigned, atomicInc, old >= value ? 0u : old + 1u)
KF_SIMT_ATOMIC_UPDATE(unsigned, unsigned, atomicDec, old == 0u || old > value ? value : old - 1u)
KF_SIMT_ATOMIC_UPDATE(float, std::uint32_t, atomicAdd, old + value)
KF_SIMT_ATOMIC_UPDATE(float, std::uint32_t, atomicExch, (static_cast<void>(old), value))
KF_SIMT_ATOMIC_UPDATE(double, std::uint64_t, atomicAdd, old + value)

// Each component for itself, as on a GPU.
inline float2 atomicAdd(float2* address, float2 value) {
  return {atomicAdd(&address->x, value.x), atomicAdd(&address->y, value.y)};
}
inline float4 atomicAdd(float4* address, float4 value) {
  return {atomicAdd(&address->x, value.x), atomicAdd(&address->y, value.y), atomicAdd(&address->z, value.z),
          atomicAdd(&address->w, value.w)};
}
KF_SIMT_ATOMIC_SCOPES(float2, atomicAdd)
KF_SIMT_ATOMIC_SCOPES(float4, atomicAdd)

#undef KF_SIMT_ATOMIC_SCOPES
#undef KF_SIMT_ATOMIC_FETCH
#undef KF_SIMT_ATOMIC_UPDATE
#undef KF_SIMT_ATOMIC_CAS
#undef KF_SIMT_ATOMIC_INTEGER

}  // namespace kf::simt
