// residual_layer_norm v3_registers: a warp a row, up to 4 KB, in registers
//
// Idea      layer_norm's v3 with the residual added where the row is loaded: all of x and of the residual is under way
//           before the first sum is taken. x_bias and dropout change x when it has come.
// Since v2  A warp takes a row up to 4 KB, without a barrier; wider rows take a block with two instead of six. Weight
//           and bias are asked for all at once, but for rows of 512 threads.
// Launch    as layer_norm's v3_registers
// Moves     4·rows·width·sizeof(T) bytes; about 11·rows·width FLOPs. With x_bias width·sizeof(T) more (after the first
//           rows it comes from cache); dropout moves nothing
// Limits    width ≤ 16384 (float64: 8192), rows ≤ 2³¹−1
#include <step3/front.h>
#include <step3/held_row.h>

#include "rungs.h"

namespace kf::KF_BACKEND::residual_layer_norm {
namespace {

// As store_held, but all of weight and bias are asked for before the first is needed. There is room for them: two rows
// were on their way into these registers. layer_norm, where there was one, would have fewer blocks beside each other.
template <class Row, class T, class C>
__device__ __forceinline__ void store_at_once(const C (&value)[Row::kItems][Row::N], const Statistics<C>& s, int width,
                                              const T* weight, const T* bias, T* y) {
  Vector<T, Row::N> weights[Row::kItems], biases[Row::kItems];
  Row::for_each_piece(width, [&](int i, int column) {
    weights[i] = load_vector<Row::N>(weight + column);
    biases[i] = load_vector<Row::N>(bias + column);
  });
  Row::for_each_piece(width, [&](int i, int column) {
    C w[Row::N], b[Row::N], out[Row::N];
    widen(weights[i], w);
    widen(biases[i], b);
#pragma unroll
    for (int j = 0; j < Row::N; ++j) out[j] = s.normalize(value[i][j]) * w[j] + b[j];
    store_vector<Row::N>(y + column, narrow<T>(out));
  });
}

template <class Row, class T, class Front, class C = compute_t<T>>
__global__ void __launch_bounds__(Row::kThreads* kRowsOfBlock<Row>)
    v3_registers_kernel(const T* __restrict__ x, const T* __restrict__ residual, const T* __restrict__ weight,
                        const T* __restrict__ bias, T* __restrict__ y, T* __restrict__ sum, Kept<C> kept, int64_t rows,
                        int width, C eps, Front front) {
  constexpr int N = Row::N;
  __shared__ C shared[3 * Row::kThreads / kWarpSize];
  const int64_t row = int64_t{blockIdx.x} * kRowsOfBlock<Row> + threadIdx.y;
  if (row >= rows) return;  // a whole warp; a block that takes a row has one
  const int64_t first = row * width;

  front.read();
  C value[Row::kItems][N] = {};
  using Loaded = typename Front::template Loaded<T, N>;
  Loaded one[Row::kItems], other[Row::kItems];
  Row::for_each_piece(width, [&](int i, int column) {
    one[i] = load_as<Loaded>(x + first + column);
    other[i] = load_as<Loaded>(residual + first + column);
  });
  Row::for_each_piece(width, [&](int i, int column) {
    C more[N];
    widen(one[i], value[i]);
    front.apply(first + column, column, value[i]);
    widen(other[i], more);
#pragma unroll
    for (int j = 0; j < N; ++j) value[i][j] += more[j];
    store_vector<N>(sum + first + column, narrow<T>(value[i]));
  });
  const Statistics<C> s = held_statistics<Row>(value, width, eps, shared);
  if (threadIdx.x == 0) kept.keep(row, s);
  if constexpr (Row::kThreads == 512) {  // whose threads have 128 registers at most
    store_held<Row>(value, s, width, weight, bias, y + first);
  } else {
    store_at_once<Row>(value, s, width, weight, bias, y + first);
  }
}

}  // namespace

std::string v3_registers_supports(const Args& a) { return too_many_or_too_wide_to_hold(a.rows, a.width, a.dtype); }

void v3_registers(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const bool vectors = aligned_16(a.x, a.residual, a.weight, a.bias, a.y, a.sum, a.x_bias);
    with_held_row<T>(a.width, vectors, [&](auto shape) {
      using Row = decltype(shape);
      constexpr int kRows = kRowsOfBlock<Row>;
      with_front<T>(a, [&](auto front) {
        v3_registers_kernel<Row, T>
            <<<static_cast<unsigned>(ceil_div(a.rows, kRows)), dim3(Row::kThreads, kRows), 0, as_stream(stream)>>>(
                static_cast<const T*>(a.x), static_cast<const T*>(a.residual), static_cast<const T*>(a.weight),
                static_cast<const T*>(a.bias), static_cast<T*>(a.y), static_cast<T*>(a.sum), kept_of<T>(a), a.rows,
                static_cast<int>(a.width), static_cast<compute_t<T>>(a.eps), front);
      });
    });
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::residual_layer_norm
