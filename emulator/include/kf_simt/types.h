// CUDA's keywords and vector types.
#pragma once

#include <cstddef>
#include <cstdint>

#define KF_EMULATED 1

#ifndef __global__  // else traced.h stands before this
#define __global__
#define __device__
#define __host__
#endif
#define __constant__
#ifdef __linux__
#define __managed__ __attribute__((section("kf_managed")))  // where the runtime API knows them
#else
#define __managed__
#endif
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))
#ifndef __clang__
#define __builtin_assume(condition) ((condition) ? static_cast<void>(0) : __builtin_unreachable())
#endif
// __shared__ and __noinline__ are rewritten, and the compiler knows __restrict__.

// For the emulation's own steps, which a race detector must not take for the kernel's.
#define KF_SIMT_UNINSTRUMENTED __attribute__((no_sanitize_thread))

#define KF_SIMT_VECTOR(T, name, align2, align4)                         \
  struct name##1 { T x; };                                              \
  struct alignas(align2) name##2 { T x, y; };                           \
  struct name##3 { T x, y, z; };                                        \
  struct alignas(align4) name##4 { T x, y, z, w; };                     \
  constexpr name##1 make_##name##1(T x) { return {x}; }                 \
  constexpr name##2 make_##name##2(T x, T y) { return {x, y}; }         \
  constexpr name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
  constexpr name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

namespace kf::simt {

KF_SIMT_VECTOR(signed char, char, 2, 4)
KF_SIMT_VECTOR(unsigned char, uchar, 2, 4)
KF_SIMT_VECTOR(short, short, 4, 8)
KF_SIMT_VECTOR(unsigned short, ushort, 4, 8)
KF_SIMT_VECTOR(int, int, 8, 16)
KF_SIMT_VECTOR(unsigned int, uint, 8, 16)
KF_SIMT_VECTOR(long, long, 2 * sizeof(long), 16)
KF_SIMT_VECTOR(unsigned long, ulong, 2 * sizeof(long), 16)
KF_SIMT_VECTOR(long long, longlong, 16, 16)
KF_SIMT_VECTOR(unsigned long long, ulonglong, 16, 16)
KF_SIMT_VECTOR(float, float, 8, 16)
KF_SIMT_VECTOR(double, double, 16, 16)

// CUDA 13's names for vectors of four 8-byte numbers with the alignment in the name.
#define KF_SIMT_ALIGNED(T, name, align)                       \
  struct alignas(align) name##4_##align##a { T x, y, z, w; }; \
  constexpr name##4_##align##a make_##name##4_##align##a(T x, T y, T z, T w) { return {x, y, z, w}; }
KF_SIMT_ALIGNED(long long, longlong, 16)
KF_SIMT_ALIGNED(unsigned long long, ulonglong, 16)
KF_SIMT_ALIGNED(double, double, 16)
KF_SIMT_ALIGNED(long long, longlong, 32)
KF_SIMT_ALIGNED(unsigned long long, ulonglong, 32)
KF_SIMT_ALIGNED(double, double, 32)

struct dim3 {
  unsigned int x, y, z;
  constexpr dim3(unsigned int x_ = 1, unsigned int y_ = 1, unsigned int z_ = 1) : x(x_), y(y_), z(z_) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};

}  // namespace kf::simt

#undef KF_SIMT_VECTOR
#undef KF_SIMT_ALIGNED

// CUDA's names stand at global scope. Their definitions stay in this namespace, so that no symbol of the emulation can
// be taken for one of the real CUDA in the same library.
using namespace kf::simt;
