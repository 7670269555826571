// cross_entropy in plain C++: maximum, sum, loss and gradient, a row at a time.
#include "cpu/cross_entropy_cpu.h"

#include <kf/cpu.h>
#include <step1/rows_cpu.h>
#include <step2/vectorised_cpu.h>

#include <cmath>
#include <limits>
#include <vector>

namespace kf::cpu {
namespace {

template <class C>
struct Sums {
  C max, sum;
};

// `row` becomes exp(row − max). A row of −∞ alone has no maximum to subtract; its sum is 0.
template <class C>
KF_CPU_INLINE Sums<C> exponentials_inline(C* row, int64_t width) {
  const C greatest = max_of(row, width), max = greatest == -INFINITY ? C(0) : greatest;
  return {max, exp_and_sum(row, row, width, max)};
}
KF_CPU_CLONES Sums<float> exponentials(float* row, int64_t width) { return exponentials_inline(row, width); }
KF_CPU_CLONES Sums<double> exponentials(double* row, int64_t width) { return exponentials_inline(row, width); }

template <class T>
void one_row(const kf::cross_entropy::Args& a, int64_t row, compute_t<T>* p) {
  using C = compute_t<T>;
  const T* logits = static_cast<const T*>(a.logits) + row * a.logits_stride;
  const int64_t target = a.targets[row];  // the host has checked it
  const bool ignored = target == a.ignore_index;
  C& loss = static_cast<C*>(a.loss)[row];
  T* grad = a.grad == nullptr ? nullptr : static_cast<T*>(a.grad) + row * a.grad_stride;
  if (ignored && a.lse == nullptr) {
    loss = 0;
    for (int64_t c = 0; grad != nullptr && c < a.width; ++c) grad[c] = T(0);
    return;
  }
  for (int64_t c = 0; c < a.width; ++c) p[c] = static_cast<C>(logits[c]);
  const C at_target = ignored ? C(0) : p[target];
  const auto [max, sum] = exponentials(p, a.width);
  loss = ignored ? C(0) : std::log(sum) - (at_target - max);
  if (a.lse != nullptr) static_cast<C*>(a.lse)[row] = max + std::log(sum);
  if (grad == nullptr) return;
  const C factor = (ignored ? C(0) : C(1)) / sum;
  for (int64_t c = 0; c < a.width; ++c) p[c] *= factor;
  if (!ignored) p[target] -= 1;
  for (int64_t c = 0; c < a.width; ++c) grad[c] = static_cast<T>(p[c]);
}

}  // namespace

void cross_entropy(const kf::cross_entropy::Args& a) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    for_rows(a.rows, a.width, [&](int64_t begin, int64_t end) {
      std::vector<compute_t<T>> p(static_cast<size_t>(a.width));  // the row's exponentials
      for (int64_t row = begin; row < end; ++row) one_row<T>(a, row, p.data());
    });
  });
}

}  // namespace kf::cpu
