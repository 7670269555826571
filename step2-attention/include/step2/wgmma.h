// wgmma: a product of matrices for a warpgroup, four warps that begin at a multiple of four. B, and A if it likes, are
// read from shared memory while the threads go on. Compute capability 9.0 exactly: nvcc -arch=sm_90a.
// PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
//
//   wgmma_fence();                     // before the first product, and after registers that it uses were changed
//   wgmma<128, T>(d, a, b, true);      // as many as there are steps of 16 along k
//   wgmma_commit(); wgmma_wait<0>();   // now d may be read, and a and b overwritten
//
// d, 64 × N floats: warp w of the group holds rows 16w to 16w + 15, its lane the columns 2t and 2t + 1 of each eight:
// with g = lane / 4, t = lane % 4, d[i] is row 16w + g + 8·(i / 2 % 2), column 8·(i / 4) + 2t + i % 2.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <step2/shared_address.h>
#include <step2/tma.h>

#include <cstdint>
#include <type_traits>

namespace kf::KF_BACKEND {

// Which index of an operand lies in neighbouring elements. A is M × K, B is K × N; kMN means M for A and N for B.
enum class Major { kK = 0, kMN = 1 };

// Where an operand lies: 16 columns of k for one instruction. PTX ISA, "Matrix Descriptor Format" and "Strides".
//
// In shared memory a tile is made of blocks of 8 rows (k-major: rows of M or N; mn-major: of k), each row one swizzle
// width: 16 bytes without a swizzle, else 32, 64 or 128. Such blocks, as TMA writes them, begin at multiples of 128,
// 256, 512 or 1024 bytes. The two distances, in bytes:
//                    leading                                    stride
//   k-major, none    to the next 8 elements of k                to the next 8 rows
//   k-major, swizzle not looked at                              to the next 8 rows
//   mn-major, none   to the next 8 of k                         to the next 8 elements of M or N
//   mn-major, swizzle to the next block of M or N               to the next 8 of k
// The next 16 of k, k-major: add 32 bytes to `start` (without a swizzle, two leading distances). Mn-major: two times
// the distance to the next 8 of k.
__device__ __forceinline__ uint64_t matrix_descriptor(const void* start, uint32_t leading, uint32_t stride,
                                                      Swizzle swizzle) {
  const uint64_t mode = swizzle == Swizzle::kNone ? 0 : swizzle == Swizzle::k128 ? 1 : swizzle == Swizzle::k64 ? 2 : 3;
  return uint64_t{(smem_address(start) & 0x3ffff) >> 4} | uint64_t{(leading & 0x3ffff) >> 4} << 16 |
         uint64_t{(stride & 0x3ffff) >> 4} << 32 | mode << 62;
}

// Orders what the threads did to registers and, after tma_store_fence, to shared memory before the products that
// follow. PTX: wgmma.fence
__device__ __forceinline__ void wgmma_fence() {
  if constexpr (!kHas90a) return __trap();
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Closes a group of products. PTX: wgmma.commit_group
__device__ __forceinline__ void wgmma_commit() {
  if constexpr (!kHas90a) return __trap();
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until no more than the kNewest newest groups are at work. PTX: wgmma.wait_group
template <int kNewest>
__device__ __forceinline__ void wgmma_wait() {
  if constexpr (!kHas90a) return __trap();
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kNewest) : "memory");
}

// The accumulators as the instruction names them, and as operands: those of the next smaller N, and the rest.
#define KF_WGMMA_TEXT_32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define KF_WGMMA_TEXT_64 KF_WGMMA_TEXT_32 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define KF_WGMMA_TEXT_128                                                                    \
  KF_WGMMA_TEXT_64                                                                           \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53" \
  ",%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define KF_WGMMA_TEXT_192                                                                    \
  KF_WGMMA_TEXT_128                                                                          \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85" \
  ",%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define KF_WGMMA_TEXT_256                                                                            \
  KF_WGMMA_TEXT_192                                                                                  \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115" \
  ",%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define KF_WGMMA_DATA_32                                                                                      \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define KF_WGMMA_DATA_64                                                                                       \
  KF_WGMMA_DATA_32, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), \
      "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),  \
      "+f"(d[31])
#define KF_WGMMA_DATA_128                                                                                      \
  KF_WGMMA_DATA_64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), \
      "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]),  \
      "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]),  \
      "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),  \
      "+f"(d[63])
#define KF_WGMMA_DATA_192                                                                                       \
  KF_WGMMA_DATA_128, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), \
      "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]),   \
      "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]),   \
      "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]),   \
      "+f"(d[95])
#define KF_WGMMA_DATA_256                                                                                             \
  KF_WGMMA_DATA_192, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]),    \
      "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), \
      "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), \
      "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), \
      "+f"(d[127])

// What goes in: two descriptors, or A in registers and the descriptor of B.
#define KF_WGMMA_DESCRIBED \
  "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kA)), "n"(static_cast<int>(kB))
#define KF_WGMMA_REGISTERS \
  "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kB))

// d = a · b, or d += a · b where `accumulate`. 64 × N floats from 64 × 16 and 16 × N elements of 16 bits, both
// described by matrix_descriptor. PTX: wgmma.mma_async.m64nNk16
template <int N, class T, Major kA = Major::kK, Major kB = Major::kK>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>, "bfloat16 or float16");
  if constexpr (!kHas90a) return __trap();
  constexpr bool kBrain = std::is_same_v<T, __nv_bfloat16>;
  if constexpr (N == 32 && kBrain) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %18, 0; "
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" KF_WGMMA_TEXT_32 "}, %16, %17, p, 1, 1, %19, %20; }"
        : KF_WGMMA_DATA_32
        : KF_WGMMA_DESCRIBED);
  } else if constexpr (N == 32 && !kBrain) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %18, 0; "
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {" KF_WGMMA_TEXT_32 "}, %16, %17, p, 1, 1, %19, %20; }"
        : KF_WGMMA_DATA_32
        : KF_WGMMA_DESCRIBED);
  } else if constexpr (N == 64 && kBrain) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" KF_WGMMA_TEXT_64 "}, %32, %33, p, 1, 1, %35, %36; }"
        : KF_WGMMA_DATA_64
        : KF_WGMMA_DESCRIBED);
  } else if constexpr (N == 64 && !kBrain) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" KF_WGMMA_TEXT_64 "}, %32, %33, p, 1, 1, %35, %36; }"
        : KF_WGMMA_DATA_64
        : KF_WGMMA_DESCRIBED);
  } else if constexpr (N == 128 && kBrain) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %66, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" KF_WGMMA_TEXT_128 "}, %64, %65, p, 1, 1, %67, %68; }"
        : KF_WGMMA_DATA_128
        : KF_WGMMA_DESCRIBED);
  } else if constexpr (N == 128 && !kBrain) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %66, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" KF_WGMMA_TEXT_128 "}, %64, %65, p, 1, 1, %67, %68; }"
        : KF_WGMMA_DATA_128
        : KF_WGMMA_DESCRIBED);
  } else if constexpr (N == 192 && kBrain) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %98, 0; "
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" KF_WGMMA_TEXT_192 "}, %96, %97, p, 1, 1, %99, %100; }"
        : KF_WGMMA_DATA_192
        : KF_WGMMA_DESCRIBED);
  } else if constexpr (N == 192 && !kBrain) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %98, 0; "
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 {" KF_WGMMA_TEXT_192 "}, %96, %97, p, 1, 1, %99, %100; }"
        : KF_WGMMA_DATA_192
        : KF_WGMMA_DESCRIBED);
  } else if constexpr (N == 256 && kBrain) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %130, 0; "
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" KF_WGMMA_TEXT_256
        "}, %128, %129, p, 1, 1, %131, %132; }"
        : KF_WGMMA_DATA_256
        : KF_WGMMA_DESCRIBED);
  } else if constexpr (N == 256 && !kBrain) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %130, 0; "
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" KF_WGMMA_TEXT_256
        "}, %128, %129, p, 1, 1, %131, %132; }"
        : KF_WGMMA_DATA_256
        : KF_WGMMA_DESCRIBED);
  } else {
    static_assert(N == 0, "N is 32, 64, 128, 192 or 256");
  }
}

// The same with A in registers: a[i] as operand a of mma_m16n8k16, each warp its 16 rows.
template <int N, class T, Major kB = Major::kK>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  static_assert(std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>, "bfloat16 or float16");
  if constexpr (!kHas90a) return __trap();
  constexpr bool kBrain = std::is_same_v<T, __nv_bfloat16>;
  if constexpr (N == 64 && kBrain) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" KF_WGMMA_TEXT_64
        "}, {%32,%33,%34,%35}, %36, p, 1, 1, %38; }"
        : KF_WGMMA_DATA_64
        : KF_WGMMA_REGISTERS);
  } else if constexpr (N == 64 && !kBrain) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" KF_WGMMA_TEXT_64
        "}, {%32,%33,%34,%35}, %36, p, 1, 1, %38; }"
        : KF_WGMMA_DATA_64
        : KF_WGMMA_REGISTERS);
  } else if constexpr (N == 128 && kBrain) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %69, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" KF_WGMMA_TEXT_128
        "}, {%64,%65,%66,%67}, %68, p, 1, 1, %70; }"
        : KF_WGMMA_DATA_128
        : KF_WGMMA_REGISTERS);
  } else if constexpr (N == 128 && !kBrain) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %69, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" KF_WGMMA_TEXT_128
        "}, {%64,%65,%66,%67}, %68, p, 1, 1, %70; }"
        : KF_WGMMA_DATA_128
        : KF_WGMMA_REGISTERS);
  } else if constexpr (N == 192 && kBrain) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %101, 0; "
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" KF_WGMMA_TEXT_192
        "}, {%96,%97,%98,%99}, %100, p, 1, 1, %102; }"
        : KF_WGMMA_DATA_192
        : KF_WGMMA_REGISTERS);
  } else if constexpr (N == 192 && !kBrain) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %101, 0; "
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 {" KF_WGMMA_TEXT_192
        "}, {%96,%97,%98,%99}, %100, p, 1, 1, %102; }"
        : KF_WGMMA_DATA_192
        : KF_WGMMA_REGISTERS);
  } else if constexpr (N == 256 && kBrain) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %133, 0; "
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" KF_WGMMA_TEXT_256
        "}, {%128,%129,%130,%131}, %132, p, 1, 1, %134; }"
        : KF_WGMMA_DATA_256
        : KF_WGMMA_REGISTERS);
  } else if constexpr (N == 256 && !kBrain) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %133, 0; "
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" KF_WGMMA_TEXT_256
        "}, {%128,%129,%130,%131}, %132, p, 1, 1, %134; }"
        : KF_WGMMA_DATA_256
        : KF_WGMMA_REGISTERS);
  } else {
    static_assert(N == 0, "N is 64, 128, 192 or 256");
  }
}

#undef KF_WGMMA_TEXT_32
#undef KF_WGMMA_DATA_32
#undef KF_WGMMA_TEXT_64
#undef KF_WGMMA_DATA_64
#undef KF_WGMMA_TEXT_128
#undef KF_WGMMA_DATA_128
#undef KF_WGMMA_TEXT_192
#undef KF_WGMMA_DATA_192
#undef KF_WGMMA_TEXT_256
#undef KF_WGMMA_DATA_256
#undef KF_WGMMA_DESCRIBED
#undef KF_WGMMA_REGISTERS

}  // namespace kf::KF_BACKEND
