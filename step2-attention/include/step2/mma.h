// Tensor cores for one warp: small matrices from shared memory into registers, their product, and back.
//
// All 32 lanes call each function together. Lane l counts as row g = l / 4 and column t = l % 4 of a grid of 8 × 4; a
// fragment is a lane's part of a matrix. Products need compute capability 8.0, ldmatrix 7.5.
// PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <kf/numeric.h>
#include <step2/shared_address.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace kf::KF_BACKEND {

// d += a · b: 16 × 8 floats, from 16 × 16 and 16 × 8 elements of 16 bits. PTX: mma.sync.m16n8k16
//   a[0]: row g, columns 2t and 2t + 1     a[1]: row g + 8     a[2]: row g, columns 2t + 8, 2t + 9    a[3]: both
//   b[0]: rows 2t and 2t + 1, column g     b[1]: rows 2t + 8, 2t + 9
//   d[0], d[1]: row g, columns 2t, 2t + 1  d[2], d[3]: row g + 8
// A register holds two elements, the one with the smaller index in its lower half.
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>, "bfloat16 or float16");
  if constexpr (!kHas80) return __trap();
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// Two floats as a register of such an operand, rounded to nearest even. PTX: cvt.rn.bf16x2.f32, cvt.rn.f16x2.f32
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  T pair[2];
  round_pair(low, high, pair[0], pair[1]);
  uint32_t bits;
  memcpy(&bits, pair, sizeof bits);
  return bits;
}

// The same for TF32, floats of which the last 13 bits are not looked at: 16 × 8 and 8 × 8. PTX: mma.sync.m16n8k8
//   a[0]: row g, column t     a[1]: row g + 8     a[2]: row g, column t + 4     a[3]: both
//   b[0]: row t, column g     b[1]: row t + 4     d as above
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (!kHas80) return __trap();
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// A float as the nearest TF32, in a register for mma_m16n8k8_tf32. PTX: cvt.rna.tf32.f32
__device__ __forceinline__ uint32_t to_tf32(float x) {
  uint32_t bits = 0;
  if constexpr (!kHas80) return __trap(), bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}

// N matrices of 8 × 8 elements of 16 bits, from rows of 16 bytes in shared memory. PTX: ldmatrix
// Lane 8m + i gives the address of row i of matrix m, a multiple of 16; with N < 4 the addresses of the last lanes are
// not looked at. Register m gets row g, columns 2t and 2t + 1 of matrix m; transposed, rows 2t and 2t + 1 of column g.
// Four matrices so are operand a of mma_m16n8k16 (rows 0-7 and 8-15 of columns 0-7, then of columns 8-15), two are b if
// b's columns lie in rows, and two transposed if its rows do.
template <int N>
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[N], const void* row) {
  static_assert(N == 1 || N == 2 || N == 4, "one, two or four matrices");
  if constexpr (!kHas75) return __trap();
  const uint32_t address = smem_address(row);
  if constexpr (N == 1) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(address) : "memory");
  } else if constexpr (N == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  }
}

template <int N>
__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&r)[N], const void* row) {
  static_assert(N == 1 || N == 2 || N == 4, "one, two or four matrices");
  if constexpr (!kHas75) return __trap();
  const uint32_t address = smem_address(row);
  if constexpr (N == 1) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(address) : "memory");
  } else if constexpr (N == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  }
}

// The way back, from compute capability 9.0 on. PTX: stmatrix
template <int N>
__device__ __forceinline__ void stmatrix(void* row, const uint32_t (&r)[N]) {
  static_assert(N == 1 || N == 2 || N == 4, "one, two or four matrices");
  if constexpr (!kHas90) return __trap();
  const uint32_t address = smem_address(row);
  if constexpr (N == 1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(address), "r"(r[0]) : "memory");
  } else if constexpr (N == 2) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1,%2};" ::"r"(address), "r"(r[0]), "r"(r[1])
                 : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
  }
}

template <int N>
__device__ __forceinline__ void stmatrix_transposed(void* row, const uint32_t (&r)[N]) {
  static_assert(N == 1 || N == 2 || N == 4, "one, two or four matrices");
  if constexpr (!kHas90) return __trap();
  const uint32_t address = smem_address(row);
  if constexpr (N == 1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(address), "r"(r[0]) : "memory");
  } else if constexpr (N == 2) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(address), "r"(r[0]), "r"(r[1])
                 : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
  }
}

}  // namespace kf::KF_BACKEND
