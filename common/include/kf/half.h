// float16 and bfloat16 for the plain C++ versions, without torch or CUDA: 16 bits, computed with as float. Without a
// branch, so that a loop of conversions becomes vector instructions on CPUs that have none for it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace kf::cpu {

inline float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// Rounded to nearest even; NaN stays NaN. The conversions are FP16's, https://github.com/Maratyszcza/FP16, as torch has
// them: the same bits.
struct Half {
  uint16_t bits;

  Half() = default;
  explicit Half(float x) {
    float base = std::fabs(x) * 0x1p+112f * 0x1p-110f;  // what is too great for a half becomes infinite
    const uint32_t word = bits_of_float(x), twice = word + word;
    const uint32_t exponent = twice & 0xff000000u;
    // A float next to which the last bit of the half is the last bit: the sum rounds there.
    base += float_of_bits(((exponent < 0x71000000u ? 0x71000000u : exponent) >> 1) + 0x07800000u);
    const uint32_t sum = bits_of_float(base);
    const uint32_t rest = (sum >> 13 & 0x7c00u) + (sum & 0x0fffu);
    bits = static_cast<uint16_t>((word >> 16 & 0x8000u) | (twice > 0xff000000u ? 0x7e00u : rest));
  }
  operator float() const {
    const uint32_t word = uint32_t{bits} << 16, twice = word + word;
    const float normal = float_of_bits((twice >> 4) + (0xe0u << 23)) * 0x1p-112f;
    const float subnormal = float_of_bits((twice >> 17) | (126u << 23)) - 0.5f;
    return float_of_bits((word & 0x80000000u) | bits_of_float(twice < 1u << 27 ? subnormal : normal));
  }
};

struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;
  explicit BFloat16(float x) {
    const uint32_t word = bits_of_float(x);
    bits = static_cast<uint16_t>(std::isnan(x) ? 0x7fc0u : (word + 0x7fffu + (word >> 16 & 1)) >> 16);
  }
  operator float() const { return float_of_bits(uint32_t{bits} << 16); }
};

}  // namespace kf::cpu
