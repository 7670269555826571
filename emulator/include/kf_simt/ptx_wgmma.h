// wgmma.mma_async: a warpgroup's product of matrices in shared memory. Each of its four warps computes 16 of the 64
// rows, when its 32 lanes have arrived, and the result is there at once. But a group of products is complete only when
// all four warps have computed their parts, and that is what wgmma.wait_group waits for: after it one thread may
// release the tiles that all four read.
//
// A descriptor says where the 16-byte chunks of a tile lie. Bits 0 to 13: the start / 16; 16 to 29: the leading offset
// / 16; 32 to 45: the stride offset / 16; 49 to 51: the base offset; 62 and 63: the swizzle. Chunk (r, c) of a K-major
// tile holds row r, the c-th 16 bytes of it; of an MN-major one, k = r and the c-th eight rows.
#pragma once

#include "kf_simt/ptx_matrix.h"
#include "kf_simt/tensor_map.h"

namespace kf::simt::ptx {

struct MatrixDescriptor {
  unsigned start, leading, stride, phase;
  TensorMap::Swizzle swizzle;
  unsigned width;  // chunks to a row of the swizzle's pattern

  explicit MatrixDescriptor(std::uint64_t bits)
      : start(field(bits, 0)),
        leading(field(bits, 16)),
        stride(field(bits, 32)),
        phase(static_cast<unsigned>(bits >> 49) & 7) {
    constexpr TensorMap::Swizzle kSwizzles[] = {TensorMap::kNone, TensorMap::k128, TensorMap::k64, TensorMap::k32};
    constexpr unsigned kWidths[] = {1, 8, 4, 2};
    swizzle = kSwizzles[bits >> 62];
    width = kWidths[bits >> 62];
  }

  // The chunk's address in shared memory.
  unsigned k_major(unsigned row, unsigned chunk) const {
    const unsigned step = swizzle == TensorMap::kNone ? leading : 16;
    return swizzled(start + row % 8 * (16 * width) + row / 8 * stride + chunk * step, swizzle, phase);
  }
  unsigned mn_major(unsigned k, unsigned chunk) const {
    const unsigned across =
        swizzle == TensorMap::kNone ? chunk * stride + k / 8 * leading : chunk / width * leading + k / 8 * stride;
    return swizzled(start + across + k % 8 * (16 * width) + chunk % width * 16, swizzle, phase);
  }

 private:
  static unsigned field(std::uint64_t bits, int from) { return (static_cast<unsigned>(bits >> from) & 0x3fff) << 4; }
};

struct Chunk {
  std::uint32_t words[4];
};

template <class D, int N>
struct WarpgroupLane {
  static constexpr int kChunks = (2 * N + warpSize - 1) / warpSize;
  bool registers;  // A comes from registers
  bool mn_a, mn_b, accumulate, negative;
  Chunk a;           // registers, or the chunk of A that this lane has read
  Chunk b[kChunks];  // chunks lane, lane + 32, …
  typename Accumulators<D>::Register* c;
};

template <class D, class A, class B, int N>
struct WarpgroupWork {
  static constexpr int kPer = Packed<A>::kPerRegister;
  static constexpr int K = 8 * kPer;
  using Lane = WarpgroupLane<D, N>;

  KF_SIMT_UNINSTRUMENTED void operator()(Lane* const* lanes) const {
    float a[16][K], b[K][N];
    const Lane& first = *lanes[0];
    for (int lane = 0; lane < warpSize; ++lane) {
      const Chunk& chunk = lanes[lane]->a;
      for (int word = 0; word < 4; ++word) {
        for (int i = 0; i < kPer; ++i) {
          float value = Packed<A>::value(chunk.words[word], i);
          if (first.negative) value = -value;
          if (first.registers) {
            a[lane / 4 + 8 * (word % 2)][word / 2 * 4 * kPer + lane % 4 * kPer + i] = value;
          } else if (first.mn_a) {
            a[lane / 16 * 8 + (word * kPer + i) % 8][lane % 16] = value;
          } else {
            a[lane / 2][(lane % 2 * 4 + word) * kPer + i] = value;
          }
        }
      }
    }
    for (int q = 0; q < 2 * N; ++q) {
      const Chunk& chunk = lanes[q % warpSize]->b[q / warpSize];
      for (int word = 0; word < 4; ++word) {
        for (int i = 0; i < kPer; ++i) {
          const float value = Packed<B>::value(chunk.words[word], i);
          if (first.mn_b) {
            b[q % 16][(q / 16 * 8 + word * kPer + i) % N] = value;
          } else {
            b[(q % 2 * 4 + word) * kPer + i][q / 2] = value;
          }
        }
      }
    }
    for (int row = 0; row < 16; ++row) {
      // Of row `row`, lane 4·(row % 8) + t holds columns 8j + 2t and 8j + 2t + 1.
      float c[N];
      for (int col = 0; col < N; ++col) {
        c[col] = first.accumulate ? Accumulators<D>::get(lanes[row % 8 * 4 + col % 8 / 2]->c, place(row, col)) : 0.0f;
      }
      for (int k = 0; k < K; ++k) {
        const float left = a[row][k];
        for (int col = 0; col < N; ++col) c[col] += left * b[k][col];
      }
      for (int col = 0; col < N; ++col) {
        Accumulators<D>::set(lanes[row % 8 * 4 + col % 8 / 2]->c, place(row, col), c[col]);
      }
    }
  }
  KF_SIMT_UNINSTRUMENTED static int place(int row, int col) { return col / 8 * 4 + row / 8 * 2 + col % 2; }
};

// wgmma.commit_group and wait_group: closes a group; waits until all four warps have closed all but the `keep` newest.
void warpgroup_commit();
void warpgroup_wait(unsigned keep);

// Every lane reads its part of the tiles itself: one chunk of A, up to 16 of B.
inline Chunk read_chunk(unsigned address) { return *static_cast<const Chunk*>(kf_shared_pointer(address)); }

template <class D, class A, class B, int N, class Register, std::size_t kC, class Left>
std::array<Register, kC> warpgroup_mma(std::array<Register, kC> c, const Left& left, std::uint64_t right,
                                       bool accumulate, int sign_a, int sign_b, int mn_a, int mn_b,
                                       CallSite site = CallSite::here()) {
  constexpr bool kRegisters = !std::is_same_v<Left, std::uint64_t>;
  if (std::abs(sign_a) != 1 || std::abs(sign_b) != 1) failure(site, "wgmma with a scale that is neither 1 nor -1");
  if (warps() < warp_id() / 4 * 4 + 4) failure(site, "wgmma needs a warpgroup of four warps");
  WarpgroupLane<D, N> lane;
  lane.registers = kRegisters;
  lane.mn_a = mn_a != 0;
  lane.mn_b = mn_b != 0;
  lane.accumulate = accumulate;
  lane.negative = sign_a * sign_b < 0;
  lane.c = c.data();
  const unsigned l = kf_lane_id();
  if constexpr (kRegisters) {
    static_assert(sizeof(left) == sizeof(Chunk), "inline PTX: wgmma takes A from four registers");
    std::memcpy(&lane.a, left.data(), sizeof(Chunk));
  } else {
    const MatrixDescriptor descriptor(left);
    const unsigned warp = warp_id() % 4;
    lane.a = read_chunk(lane.mn_a ? descriptor.mn_major(l % 16, 2 * warp + l / 16)
                                  : descriptor.k_major(16 * warp + l / 2, l % 2));
  }
  const MatrixDescriptor descriptor(right);
  for (unsigned q = l, i = 0; q < 2 * N; q += warpSize, ++i) {
    lane.b[i] = read_chunk(lane.mn_b ? descriptor.mn_major(q % 16, q / 16) : descriptor.k_major(q / 2, q % 2));
  }
  whole_warp<WarpgroupWork<D, A, B, N>>("wgmma.mma_async", lane, site);
  return c;
}

}  // namespace kf::simt::ptx
