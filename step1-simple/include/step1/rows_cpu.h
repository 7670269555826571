// Loops over rows in plain C++, and sums of their columns.
#pragma once

#include <kf/cpu.h>
#include <step1/vectorised_cpu.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace kf::cpu {

constexpr int64_t kGrain = 1 << 14;  // elements below which a second thread costs more than it brings

template <class T>
KF_CPU_CLONES static void add_row(const T* x, compute_t<T>* sum, int64_t width) {
  for (int64_t c = 0; c < width; ++c) sum[c] += static_cast<compute_t<T>>(x[c]);
}

template <class F>
void for_rows(int64_t rows, int64_t width, F&& f) {
  parallel_for(0, rows, std::max<int64_t>(1, kGrain / width), [&](int64_t begin, int64_t end) { f(begin, end); });
}

// sum[c] over all rows, where add(begin, end, partial) adds rows to their part's sums. The parts depend on the shape
// alone, not on the number of threads, and are added in order: the same bits in every run.
template <class T, class F>
void sum_rows(int64_t rows, int64_t width, T* sum, F&& add) {
  using C = compute_t<T>;
  const int64_t parts = std::min<int64_t>(rows, 32);
  std::vector<C> partial(static_cast<size_t>(parts * width), C(0));
  parallel_for(0, parts, std::max<int64_t>(1, kGrain * parts / (rows * width)), [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      add(part * rows / parts, (part + 1) * rows / parts, partial.data() + part * width);
    }
  });
  for (int64_t part = 1; part < parts; ++part) add_row(partial.data() + part * width, partial.data(), width);
  for (int64_t c = 0; c < width; ++c) sum[c] = static_cast<T>(partial[static_cast<size_t>(c)]);
}

}  // namespace kf::cpu
