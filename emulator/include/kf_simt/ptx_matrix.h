// mma.sync, ldmatrix, stmatrix, movmatrix: what a warp does together with small matrices.
//
// Fragments are those of the PTX ISA. With g = lane / 4, t = lane % 4 and E elements to a 32-bit register:
//   A, 16 × K:  register r holds row g + 8·(r % 2), columns (r / 2)·4E + t·E … + E−1
//   B, K × 8:   register r holds column g, rows r·4E + t·E … + E−1
//   C, 16 × 8:  element i is in row g + 8·(i / 2), column 2t + i % 2
#pragma once

#include "kf_simt/ptx.h"

namespace kf::simt::ptx {

// Types of the elements of A and B: how many a register holds, and their values as the type that is computed with.
template <class T>
struct Plain {
  using Sum = T;
};
using F32 = Plain<float>;
using I32 = Plain<std::int32_t>;
using F64 = Plain<double>;
struct TF32 {};
struct S8 {};
struct U8 {};

template <class Half>
struct Packed {
  static constexpr int kPerRegister = 2;
  static float value(std::uint32_t bits, int i) { return Half::to_float(static_cast<std::uint16_t>(bits >> 16 * i)); }
};
template <>
struct Packed<TF32> {
  static constexpr int kPerRegister = 1;
  // The hardware does not look at the last 13 bits.
  static float value(std::uint32_t bits, int) { return __uint_as_float(bits & ~0x1fffu); }
};
template <int kExponent, int kMantissa, bool kHasInfinity>
struct Packed<Float8<kExponent, kMantissa, kHasInfinity>> {
  static constexpr int kPerRegister = 4;
  static float value(std::uint32_t bits, int i) {
    return Float8<kExponent, kMantissa, kHasInfinity>::to_float(static_cast<std::uint8_t>(bits >> 8 * i));
  }
};
template <class Byte>
struct PackedBytes {
  static constexpr int kPerRegister = 4;
  static std::int32_t value(std::uint32_t bits, int i) { return static_cast<Byte>(bits >> 8 * i); }
};
template <>
struct Packed<S8> : PackedBytes<std::int8_t> {};
template <>
struct Packed<U8> : PackedBytes<std::uint8_t> {};

// The accumulators of one lane: four floats or integers, or two registers with two halves each.
template <class D>
struct Accumulators {
  using Register = typename D::Sum;
  using Sum = typename D::Sum;
  static constexpr int kRegisters = 4;
  KF_SIMT_UNINSTRUMENTED static Sum get(const Register* registers, int i) { return registers[i]; }
  KF_SIMT_UNINSTRUMENTED static void set(Register* registers, int i, Sum value) { registers[i] = value; }
};
template <>
struct Accumulators<F16> {
  using Register = std::uint32_t;
  using Sum = float;
  static constexpr int kRegisters = 2;
  KF_SIMT_UNINSTRUMENTED static float get(const Register* registers, int i) {
    return Packed<F16>::value(registers[i / 2], i % 2);
  }
  KF_SIMT_UNINSTRUMENTED static void set(Register* registers, int i, float value) {
    const int shift = 16 * (i % 2);
    const std::uint32_t bits = std::uint32_t{F16::from_float(value)} << shift;
    registers[i / 2] = (registers[i / 2] & ~(0xffffu << shift)) | bits;
  }
};

template <class D, int kA, int kB>
struct MmaLane {
  std::uint32_t a[kA], b[kB];
  typename Accumulators<D>::Register c[Accumulators<D>::kRegisters];
};

template <class D, class A, class B, int K>
struct MmaWork {
  static constexpr int kPer = Packed<A>::kPerRegister;
  using Lane = MmaLane<D, K / (2 * kPer), K / (4 * kPer)>;
  using Sum = typename Accumulators<D>::Sum;
  // Integers wrap around.
  using Arithmetic = std::conditional_t<std::is_integral_v<Sum>, std::uint32_t, Sum>;

  KF_SIMT_UNINSTRUMENTED void operator()(Lane* const* lanes) const {
    Arithmetic a[16][K], b[K][8], c[16][8];
    for (int lane = 0; lane < warpSize; ++lane) {
      const Lane& l = *lanes[lane];
      const int g = lane / 4, t = lane % 4;
      for (int r = 0; r < K / (2 * kPer); ++r) {
        for (int i = 0; i < kPer; ++i) {
          a[g + 8 * (r % 2)][r / 2 * 4 * kPer + t * kPer + i] = static_cast<Arithmetic>(Packed<A>::value(l.a[r], i));
        }
      }
      for (int r = 0; r < K / (4 * kPer); ++r) {
        for (int i = 0; i < kPer; ++i) {
          b[r * 4 * kPer + t * kPer + i][g] = static_cast<Arithmetic>(Packed<B>::value(l.b[r], i));
        }
      }
      for (int i = 0; i < 4; ++i) {
        c[g + 8 * (i / 2)][2 * t + i % 2] = static_cast<Arithmetic>(Accumulators<D>::get(l.c, i));
      }
    }
    for (int row = 0; row < 16; ++row) {
      for (int k = 0; k < K; ++k) {
        for (int col = 0; col < 8; ++col) c[row][col] += a[row][k] * b[k][col];
      }
    }
    for (int lane = 0; lane < warpSize; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < 4; ++i) {
        Accumulators<D>::set(lanes[lane]->c, i, static_cast<Sum>(c[g + 8 * (i / 2)][2 * t + i % 2]));
      }
    }
  }
};

// m8n8k4 of doubles: A's row and B's column are lane / 4, their k is lane % 4.
struct MmaDoubleLane {
  double a, b, c[2];
};
struct MmaDoubleWork {
  KF_SIMT_UNINSTRUMENTED void operator()(MmaDoubleLane* const* lanes) const {
    for (int lane = 0; lane < warpSize; ++lane) {
      for (int i = 0; i < 2; ++i) {
        double& c = lanes[lane]->c[i];
        for (int k = 0; k < 4; ++k) {
          c = std::fma(lanes[lane / 4 * 4 + k]->a, lanes[(2 * (lane % 4) + i) * 4 + k]->b, c);
        }
      }
    }
  }
};

template <class D, class A, class B, int K, class Piece, std::size_t kA, std::size_t kB, class Register, std::size_t kC>
std::array<Register, kC> mma(const std::array<Piece, kA>& a, const std::array<Piece, kB>& b,
                             const std::array<Register, kC>& c, CallSite site = CallSite::here()) {
  std::array<Register, kC> d;
  if constexpr (std::is_same_v<D, F64>) {
    static_assert(kA == 1 && kB == 1 && kC == 2, "inline PTX: mma.sync has another number of registers");
    MmaDoubleLane lane{a[0], b[0], {c[0], c[1]}};
    whole_warp<MmaDoubleWork>("mma.sync", lane, site);
    d = {{lane.c[0], lane.c[1]}};
  } else {
    using Work = MmaWork<D, A, B, K>;
    typename Work::Lane lane;
    static_assert(sizeof(lane.a) == sizeof(a) && sizeof(lane.b) == sizeof(b) && sizeof(lane.c) == sizeof(c),
                  "inline PTX: mma.sync has another number of registers");
    std::memcpy(lane.a, a.data(), sizeof(lane.a));
    std::memcpy(lane.b, b.data(), sizeof(lane.b));
    std::memcpy(lane.c, c.data(), sizeof(lane.c));
    whole_warp<Work>("mma.sync", lane, site);
    std::memcpy(d.data(), lane.c, sizeof(lane.c));
  }
  return d;
}

// ---- 8 × 8 matrices of 16-bit elements ----

// Row i of matrix m is at the address that lane 8m + i gives, 16 bytes. A lane holds elements 2t and 2t + 1 of row g;
// transposed, row g of the transposed matrix.
struct RowsLane {
  std::uint16_t row[8];
  std::uint32_t held[4];
};

template <int kMatrices, bool kTransposed>
struct DealWork {
  KF_SIMT_UNINSTRUMENTED void operator()(RowsLane* const* lanes) const {
    for (int lane = 0; lane < warpSize; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int m = 0; m < kMatrices; ++m) {
        const auto element = [&](int row, int col) { return std::uint32_t{lanes[8 * m + row]->row[col]}; };
        lanes[lane]->held[m] = kTransposed ? element(2 * t, g) | element(2 * t + 1, g) << 16
                                           : element(g, 2 * t) | element(g, 2 * t + 1) << 16;
      }
    }
  }
};
template <int kMatrices, bool kTransposed>
struct GatherWork {
  KF_SIMT_UNINSTRUMENTED void operator()(RowsLane* const* lanes) const {
    for (int lane = 0; lane < warpSize; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int m = 0; m < kMatrices; ++m) {
        for (int i = 0; i < 2; ++i) {
          const auto bits = static_cast<std::uint16_t>(lanes[lane]->held[m] >> 16 * i);
          const int row = kTransposed ? 2 * t + i : g, col = kTransposed ? g : 2 * t + i;
          lanes[8 * m + row]->row[col] = bits;
        }
      }
    }
  }
};

struct alignas(16) Row {
  std::uint16_t element[8];
};

// Each lane reads the row that it gives the address of; then the lanes exchange registers.
template <int kMatrices, bool kTransposed>
std::array<std::uint32_t, kMatrices> load_matrix(const void* address, CallSite site = CallSite::here()) {
  RowsLane lane{};
  if (kf_lane_id() < 8 * kMatrices) {
    check_aligned(address, 16, "ldmatrix", site);
    const Row row = *static_cast<const Row*>(address);
    std::memcpy(lane.row, &row, sizeof(row));
  }
  whole_warp<DealWork<kMatrices, kTransposed>>("ldmatrix", lane, site);
  std::array<std::uint32_t, kMatrices> held;
  std::memcpy(held.data(), lane.held, sizeof(held));
  return held;
}

template <int kMatrices, bool kTransposed>
void store_matrix(void* address, const std::array<std::uint32_t, kMatrices>& held, CallSite site = CallSite::here()) {
  RowsLane lane{};
  std::memcpy(lane.held, held.data(), sizeof(held));
  whole_warp<GatherWork<kMatrices, kTransposed>>("stmatrix", lane, site);
  if (kf_lane_id() < 8 * kMatrices) {
    check_aligned(address, 16, "stmatrix", site);
    Row row;
    std::memcpy(&row, lane.row, sizeof(row));
    *static_cast<Row*>(address) = row;
  }
}

// Transposes a matrix that the warp holds.
inline std::uint32_t move_matrix(std::uint32_t held, CallSite site = CallSite::here()) {
  RowsLane lane{};
  lane.held[0] = held;
  whole_warp<GatherWork<1, true>>("movmatrix", lane, site);
  whole_warp<DealWork<1, false>>("movmatrix", lane, site);
  return lane.held[0];
}

}  // namespace kf::simt::ptx
