// dropout's backward pass in plain C++, a row at a time.
#pragma once

#include <kf/cpu.h>
#include <step1/philox_cpu.h>
#include <step1/vectorised_cpu.h>

#include <cstdint>
#include <vector>

namespace kf::cpu {

// The numbers of a row's elements, in memory that is used again for the next row.
template <class Args>
const uint16_t* row_numbers(const Args& a, int64_t row, std::vector<uint16_t>& memory) {
  const int64_t first = row * a.width, calls = (first + a.width - 1) / 8 - first / 8 + 1;
  memory.resize(static_cast<size_t>((calls + kPhiloxLanes) * 8));
  philox(a.seed, a.offset, static_cast<uint64_t>(first / 8), calls, memory.data());
  return memory.data() + first % 8;
}

template <class T>
KF_CPU_CLONES static void dropout_backward_row(const T* grad, T* grad_x, compute_t<T>* sum, int64_t width,
                                               const uint16_t* numbers, uint32_t threshold, compute_t<T> scale) {
  using C = compute_t<T>;
  for (int64_t c = 0; c < width; ++c) {
    const C product = scale * static_cast<C>(grad[c]);
    const C value = numbers[c] >= threshold ? product : C(0);
    grad_x[c] = static_cast<T>(value);
    sum[c] += value;
  }
}

}  // namespace kf::cpu
