// embedding_backward in plain C++: each row of the table adds up the gradients of its tokens.
#include "cpu/embedding_backward_cpu.h"

#include <kf/cpu.h>
#include <step1/rows_cpu.h>

#include <algorithm>
#include <vector>

namespace kf::cpu {
namespace {

template <class T>
void round_row(const compute_t<T>* __restrict__ sum, T* __restrict__ y, int64_t width) {
  for (int64_t c = 0; c < width; ++c) y[c] = static_cast<T>(sum[c]);
}

}  // namespace

void embedding_backward(const kf::embedding_backward::Args& a) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    for_rows(a.vocab, a.width, [&](int64_t begin, int64_t end) {
      std::vector<compute_t<T>> sum(static_cast<size_t>(a.width));
      for (int64_t row = begin; row < end; ++row) {
        std::fill(sum.begin(), sum.end(), compute_t<T>(0));
        for (int64_t i = a.first[row]; i < a.first[row + 1]; ++i) {
          add_row(static_cast<const T*>(a.grad) + a.order[i] * a.width, sum.data(), a.width);
        }
        round_row(sum.data(), static_cast<T*>(a.y) + row * a.width, a.width);
      }
    });
  });
}

}  // namespace kf::cpu
