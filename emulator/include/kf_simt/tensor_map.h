// A tensor map: what TMA knows of a tensor in global memory and of the box that it copies. cuda.h makes them, kernels
// use them. CUtensorMap is opaque; inside it, this struct begins at its first byte.
#pragma once

#include <cstdint>

namespace kf::simt {

struct TensorMap {
  static constexpr std::uint32_t kMagic = 0x4b46544d;
  // The values of CUtensorMapDataType and CUtensorMapSwizzle.
  enum Type : std::uint8_t { kU8, kU16, kU32, kS32, kU64, kS64, kF16, kF32, kF64, kBF16, kF32Flush, kTF32, kTF32Flush };
  enum Swizzle : std::uint8_t { kNone, k32, k64, k128 };

  std::uint32_t magic;
  Type type;
  std::uint8_t rank;
  Swizzle swizzle;
  bool fill_nan;  // what lies outside of the tensor is NaN, not zero
  std::uint64_t address;
  std::uint64_t size[5];    // elements, the innermost dimension first
  std::uint64_t stride[4];  // bytes, of the dimensions 1 to 4
  std::uint16_t box[5];
  std::uint8_t step[5];

  unsigned element_bytes() const {
    constexpr unsigned kBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
    return kBytes[type];
  }
  // How many elements of dimension d a box holds in shared memory.
  unsigned count(int d) const { return (box[d] + step[d] - 1u) / step[d]; }
  unsigned row_bytes() const { return box[0] * element_bytes(); }
  unsigned rows() const {
    unsigned rows = 1;
    for (int d = 1; d < rank; ++d) rows *= count(d);
    return rows;
  }
};

// Where a byte lies within shared memory: bits 4 to 6 of the address, or less of them, are changed by bits 7 to 9.
inline unsigned swizzled(unsigned address, TensorMap::Swizzle swizzle, unsigned phase = 0) {
  constexpr unsigned kMask[] = {0, 1, 3, 7};
  return address ^ (((address >> 7) - phase) & kMask[swizzle]) << 4;
}

}  // namespace kf::simt
