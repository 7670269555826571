// What a row comes to when the workers' x are added: bias, residual and LayerNorm, by a block.
#pragma once

#include <step3/held_row.h>
#include <step3/row.h>

#include <type_traits>

#include "peers.h"

namespace kf::KF_BACKEND::all_reduce {

template <int kItems, int N, class T, class C = compute_t<T>>
struct RowEnd {
  const Args& a;
  int64_t first;  // of the row, among the elements
  Vector<T, N> x_bias[kItems], residual[kItems], weight[kItems], bias[kItems];

  // Asks for what does not depend on other workers: it comes while the block waits for them.
  __device__ __forceinline__ RowEnd(const Args& args, int64_t row) : a(args), first(row * args.width) {
    for_each_vector<kItems, N>(static_cast<int>(a.width), [&](int i, int column) {
      x_bias[i] = load_vector<N>(static_cast<const T*>(a.x_bias) + column);
      residual[i] = load_vector<N>(static_cast<const T*>(a.residual) + first + column);
      weight[i] = load_vector<N>(static_cast<const T*>(a.weight) + column);
      bias[i] = load_vector<N>(static_cast<const T*>(a.bias) + column);
    });
  }

  // value: the workers' x. `shared`: 32 numbers.
  __device__ __forceinline__ void finish(C (&value)[kItems][N], C* shared) {
    const int width = static_cast<int>(a.width);
    for_each_vector<kItems, N>(width, [&](int i, int column) {
      C more[N], before[N];
      widen_anew(x_bias[i], more);
      widen_anew(residual[i], before);
#pragma unroll
      for (int j = 0; j < N; ++j) value[i][j] = value[i][j] + more[j] + before[j];
      store_vector<N>(static_cast<T*>(a.sum) + first + column, narrow<T>(value[i]));
    });
    const Statistics<C> s = block_statistics<kItems, N>(value, width, static_cast<C>(a.eps), shared);
    for_each_vector<kItems, N>(width, [&](int i, int column) {
      C w[N], b[N], y[N];
      widen_anew(weight[i], w);
      widen_anew(bias[i], b);
#pragma unroll
      for (int j = 0; j < N; ++j) y[j] = s.normalize(value[i][j]) * w[j] + b[j];
      store_vector<N>(static_cast<T*>(a.y) + first + column, narrow<T>(y));
    });
  }
};

// Calls f(Type<T>, kItems, N, threads) with what suits the rows.
template <class F>
void with_row(const Args& a, F&& f) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    if constexpr (!std::is_same_v<T, double>) {  // which the op refuses
      with_row_shape<T>(a.width, true, [&](auto items, auto n, unsigned threads) { f(type, items, n, threads); });
    }
  });
}

// Rows are shared out over so many blocks. Where a GPU has no room for all at once, they begin in the order of their
// numbers, on all GPUs alike: those that wait for each other come to be there together.
inline unsigned blocks_of(int64_t rows) { return static_cast<unsigned>(rows < kMostBlocks ? rows : kMostBlocks); }

}  // namespace kf::KF_BACKEND::all_reduce
