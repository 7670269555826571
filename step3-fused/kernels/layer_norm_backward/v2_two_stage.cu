// layer_norm_backward v2_two_stage: rows in registers, columns in two stages
//
// Idea      Each direction as well as it can be done alone. A row of x and of grad is read once, as in layer_norm's v3.
//           The columns are shared among many blocks, as in step 1's column_sum: each adds up a part of the rows, a
//           second stage adds up the parts, both in a fixed order, so that two runs agree to the last bit.
// Since v1  Rows are held in registers. The columns have up to 4·1056 blocks instead of three. x and grad are still
//           read twice, once for each direction.
// Launch    rows as layer_norm's v3_registers; then grid (⌈width/32⌉, parts), block 32×8, 2 KB shared memory; then grid
//           ⌈2·width/32⌉, block 32×32, 4 KB; parts: see column_grid_by_one in step 1's include/step1/column_grid.h
// Moves     (5·rows·width + 3·width)·sizeof(T) bytes (grad_sum: one more rows·width), and about 4·parts·width·4 of
//           partial sums; about 13·rows·width FLOPs
// Limits    width ≤ 16384 (float64: 8192), rows ≤ 2³¹−1
#include <step1/column_sum.h>
#include <step3/held_row.h>

#include "columns.h"
#include "row.h"
#include "rungs.h"

namespace kf::KF_BACKEND::layer_norm_backward {
namespace {

template <class Row, class T, class C = compute_t<T>>
__global__ void __launch_bounds__(Row::kThreads* kRowsOfBlock<Row>)
    v2_two_stage_rows_kernel(const T* __restrict__ grad, const T* __restrict__ x, const T* __restrict__ weight,
                             const C* __restrict__ mean, const C* __restrict__ rstd, const T* __restrict__ grad_sum,
                             T* __restrict__ grad_x, C* __restrict__ rest, int64_t rows, int width) {
  constexpr int N = Row::N;
  __shared__ C shared[3 * Row::kThreads / kWarpSize];
  const int64_t row = int64_t{blockIdx.x} * kRowsOfBlock<Row> + threadIdx.y;
  if (row >= rows) return;  // a whole warp; a block that takes a row has one
  const int64_t first = row * width;

  Vector<T, N> x_held[Row::kItems] = {}, grad_held[Row::kItems] = {};
  Row::for_each_piece(width, [&](int i, int column) {
    x_held[i] = load_vector<N>(x + first + column);
    grad_held[i] = load_vector<N>(grad + first + column);
  });
  const auto widened = [&](int i, int column, C(&off)[N], C(&g)[N]) {  // x and grad · weight
    C w[N];
    widen(x_held[i], off);
    widen(grad_held[i], g);
    widen(load_vector<N>(weight + column), w);
#pragma unroll
    for (int j = 0; j < N; ++j) g[j] = product(g[j], w[j]);
  };
  RowSums<C> sums;
  Row::for_each_piece(width, [&](int i, int column) {
    C value[N], g[N];
    widened(i, column, value, g);
#pragma unroll
    for (int j = 0; j < N; ++j) sums.add(g[j], value[j] - mean[row]);
  });
  row_sums<Row::kThreads>(sums.value, shared, [] { __syncthreads(); });
  const RowGradient<C> gradient(sums, mean[row], rstd[row], width);
  Row::for_each_piece(width, [&](int i, int column) {
    C value[N], g[N], more[N] = {};
    widened(i, column, value, g);
    if (grad_sum != nullptr) widen(load_vector<N>(grad_sum + first + column), more);
#pragma unroll
    for (int j = 0; j < N; ++j) value[j] = gradient.of_x(g[j], gradient.normalized(value[j])) + more[j];
    store_vector<N>(grad_x + first + column, narrow<T>(value));
  });
  if (threadIdx.x == 0) rest[row] = gradient.rest;
}

template <class T, class C = compute_t<T>>
__global__ void __launch_bounds__(kTileLanes* kTileRows)
    v2_two_stage_columns_kernel(const T* __restrict__ grad, const T* __restrict__ x, const C* __restrict__ mean,
                                const C* __restrict__ rest, const C* __restrict__ rstd, C* __restrict__ partial,
                                int64_t rows, int64_t width, int64_t rows_per_part) {
  __shared__ C sums[2][kTileRows][kTileLanes];
  const int64_t column = int64_t{blockIdx.x} * kTileLanes + threadIdx.x;
  const int64_t begin = blockIdx.y * rows_per_part, end = min(begin + rows_per_part, rows);
  C of_weight = 0, of_bias = 0;
  if (column < width) {
#pragma unroll 4
    for (int64_t row = begin + threadIdx.y; row < end; row += kTileRows) {
      const C g = to_compute(grad[row * width + column]);
      of_weight += g * (to_compute(x[row * width + column]) - mean[row] - rest[row]) * rstd[row];
      of_bias += g;
    }
  }
  sums[0][threadIdx.y][threadIdx.x] = of_weight;
  sums[1][threadIdx.y][threadIdx.x] = of_bias;
  __syncthreads();  // what the threads below have summed is read now
  if (threadIdx.y < 2 && column < width) {
    C total = 0;
    for (int y = 0; y < kTileRows; ++y) total += sums[threadIdx.y][y][threadIdx.x];
    partial[(2 * blockIdx.y + threadIdx.y) * width + column] = total;
  }
}

}  // namespace

std::string v2_two_stage_can_implement(const Args& a) { return too_many_or_too_wide_to_hold(a.rows, a.width, a.dtype); }

// The partial sums, and behind them what each row's saved mean lacks.
int64_t v2_two_stage_scratch_bytes(const Args& a) {
  return (column_grid_by_one(a.rows, a.width).parts * 2 * a.width + a.rows) * (a.dtype == DType::kFloat64 ? 8 : 4);
}

void v2_two_stage(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    using C = compute_t<T>;
    const ColumnGrid g = column_grid_by_one(a.rows, a.width);
    const auto grad = static_cast<const T*>(a.grad), x = static_cast<const T*>(a.x);
    const auto mean = static_cast<const C*>(a.mean), rstd = static_cast<const C*>(a.rstd);
    const auto partial = static_cast<C*>(a.scratch), rest = partial + g.parts * 2 * a.width;
    const bool vectors = aligned_16(a.grad, a.x, a.weight, a.grad_sum, a.grad_x);  // null is aligned, too
    with_held_row<T>(a.width, vectors, [&](auto shape) {
      using Row = decltype(shape);
      constexpr int kRows = kRowsOfBlock<Row>;
      v2_two_stage_rows_kernel<Row>
          <<<static_cast<unsigned>(ceil_div(a.rows, kRows)), dim3(Row::kThreads, kRows), 0, as_stream(stream)>>>(
              grad, x, static_cast<const T*>(a.weight), mean, rstd, static_cast<const T*>(a.grad_sum),
              static_cast<T*>(a.grad_x), rest, a.rows, static_cast<int>(a.width));
    });
    check_launch();
    const dim3 grid(static_cast<unsigned>(g.tiles), static_cast<unsigned>(g.parts));
    v2_two_stage_columns_kernel<<<grid, dim3(kTileLanes, kTileRows), 0, as_stream(stream)>>>(
        grad, x, mean, rest, rstd, partial, a.rows, a.width, g.rows_per_part);
    check_launch();
    finish<T>(partial, a.grad_weight, a.grad_bias, g.parts, a.width, stream);
  });
}

}  // namespace kf::KF_BACKEND::layer_norm_backward
