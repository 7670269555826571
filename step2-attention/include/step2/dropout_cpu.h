// Dropout of attention's weights in plain C++: which are kept, as include/step2/attention/dropout.h says.
#pragma once

#include <step1/philox_cpu.h>

#include <algorithm>
#include <cstdint>

namespace kf::cpu {

// What a query's weights for `count` keys from `first` on are multiplied by where there is dropout. `head` is of all
// batches. Args: q_length, k_length, threshold, seed, offset.
template <class Args, class C>
void dropout_factors(const Args& a, int64_t head, int64_t query, int64_t first, int64_t count, C* factors) {
  const int64_t row_pieces = (a.q_length + 15) / 16, column_pieces = (a.k_length + 31) / 32;
  const C kept = keep_scale<C>(a.threshold);
  uint16_t numbers[kPhiloxLanes * 8];  // of eight calls, which is what a query needs for 32 keys
  for (int64_t key = first / 32 * 32; key < first + count; key += 32) {
    const int64_t piece = (head * row_pieces + query / 16) * column_pieces + key / 32;
    philox(a.seed, a.offset, static_cast<uint64_t>(piece * 64 + query % 8 * 8), 8, numbers);
    for (int64_t j = std::max(key, first); j < std::min(key + 32, first + count); ++j) {
      const uint16_t number = numbers[j % 8 * 8 + query / 8 % 2 + j / 8 % 4 * 2];
      factors[j - first] = number >= a.threshold ? kept : C(0);
    }
  }
}

}  // namespace kf::cpu
