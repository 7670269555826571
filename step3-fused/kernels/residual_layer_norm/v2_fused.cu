// residual_layer_norm v2_fused: one launch
//
// Idea      LayerNorm's v2 holds the row in registers. Adding the residual there costs one more read, and the sum,
//           which the next layer wants, is written from registers: it never has to come back. x_bias and dropout
//           change x there as well: a thread's vector of half types is one call of Philox.
// Since v1  One launch instead of two, and one trip through memory less. LayerNorm sees the sum as it was before it
//           was rounded to T.
// Launch    as layer_norm's v2_block: grid rows; block up to 256 threads, up to 1024 for wide rows
// Moves     4·rows·width·sizeof(T) bytes; about 11·rows·width FLOPs. With x_bias width·sizeof(T) more (after the first
//           rows it comes from cache); dropout moves nothing
// Limits    width ≤ 8192 (float64: 4096), rows ≤ 2³¹−1
#include <step3/front.h>
#include <step3/row.h>

#include "rungs.h"

namespace kf::KF_BACKEND::residual_layer_norm {
namespace {

template <int kItems, int N, class T, class Front, class C = compute_t<T>>
__global__ void __launch_bounds__(kMostRowThreads, 1)
    v2_fused_kernel(const T* __restrict__ x, const T* __restrict__ residual, const T* __restrict__ weight,
                    const T* __restrict__ bias, T* __restrict__ y, T* __restrict__ sum, Kept<C> kept, int width, C eps,
                    Front front) {
  using Loaded = typename Front::template Loaded<T, N>;
  __shared__ C shared[kWarpSize];
  const int64_t row = int64_t{blockIdx.x} * width;

  front.read();
  C value[kItems][N] = {};
  for_each_vector<kItems, N>(width, [&](int i, int column) {
    const auto a = load_as<Loaded>(x + row + column), b = load_as<Loaded>(residual + row + column);
    C more[N];
    widen(a, value[i]);
    front.apply(row + column, column, value[i]);
    widen(b, more);
    Vector<T, N> rounded;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      value[i][j] += more[j];
      rounded.element[j] = from_compute<T>(value[i][j]);
    }
    store_vector<N>(sum + row + column, rounded);
  });
  const Statistics<C> s = block_statistics<kItems, N>(value, width, eps, shared);
  if (threadIdx.x == 0) kept.keep(blockIdx.x, s);
  store_normalized<kItems, N>(value, s, width, weight, bias, y + row);
}

}  // namespace

std::string v2_fused_can_implement(const Args& a) { return too_many_or_too_wide(a.rows, a.width, a.dtype); }

void v2_fused(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const bool vectors = aligned_16(a.x, a.residual, a.weight, a.bias, a.y, a.sum, a.x_bias);
    with_row_shape<T>(a.width, vectors, [&](auto items, auto n, unsigned threads) {
      with_front<T>(a, [&](auto front) {
        v2_fused_kernel<decltype(items)::value, decltype(n)::value, T>
            <<<static_cast<unsigned>(a.rows), threads, 0, as_stream(stream)>>>(
                static_cast<const T*>(a.x), static_cast<const T*>(a.residual), static_cast<const T*>(a.weight),
                static_cast<const T*>(a.bias), static_cast<T*>(a.y), static_cast<T*>(a.sum), kept_of<T>(a),
                static_cast<int>(a.width), static_cast<compute_t<T>>(a.eps), front);
      });
    });
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::residual_layer_norm
