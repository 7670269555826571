// philox.h in plain C++: many calls side by side.
#pragma once

#include <step1/vectorised_cpu.h>

#include <cstdint>

namespace kf::cpu {

constexpr int kPhiloxLanes = 16;  // Philox calls side by side: a vector register of 32-bit numbers

// As philox.h: the 16-bit numbers of calls first, first + 1, …, eight of each, for `calls` calls, rounded up to
// kPhiloxLanes.
KF_CPU_CLONES static void philox(uint64_t seed, uint64_t offset, uint64_t first, int64_t calls, uint16_t* numbers) {
  for (int64_t begin = 0; begin < calls; begin += kPhiloxLanes) {
    uint32_t x[kPhiloxLanes], y[kPhiloxLanes], z[kPhiloxLanes], w[kPhiloxLanes];
    for (int l = 0; l < kPhiloxLanes; ++l) {
      const uint64_t subsequence = first + static_cast<uint64_t>(begin + l);
      x[l] = static_cast<uint32_t>(offset / 4);
      y[l] = static_cast<uint32_t>(offset / 4 >> 32);
      z[l] = static_cast<uint32_t>(subsequence);
      w[l] = static_cast<uint32_t>(subsequence >> 32);
    }
    uint32_t key_x = static_cast<uint32_t>(seed), key_y = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
      for (int l = 0; l < kPhiloxLanes; ++l) {
        const uint64_t a = uint64_t{0xD2511F53} * x[l];
        const uint64_t b = uint64_t{0xCD9E8D57} * z[l];
        x[l] = static_cast<uint32_t>(b >> 32) ^ y[l] ^ key_x;
        y[l] = static_cast<uint32_t>(b);
        z[l] = static_cast<uint32_t>(a >> 32) ^ w[l] ^ key_y;
        w[l] = static_cast<uint32_t>(a);
      }
      key_x += 0x9E3779B9;
      key_y += 0xBB67AE85;
    }
    for (int l = 0; l < kPhiloxLanes; ++l) {
      const uint32_t words[] = {x[l], y[l], z[l], w[l]};
      for (int j = 0; j < 4; ++j) {
        numbers[8 * (begin + l) + 2 * j] = static_cast<uint16_t>(words[j]);
        numbers[8 * (begin + l) + 2 * j + 1] = static_cast<uint16_t>(words[j] >> 16);
      }
    }
  }
}

// What kept elements are multiplied by: see philox.h.
template <class C>
C keep_scale(uint32_t threshold) {
  return threshold < 65536 ? C(65536) / C(65536 - threshold) : C(0);
}

}  // namespace kf::cpu
