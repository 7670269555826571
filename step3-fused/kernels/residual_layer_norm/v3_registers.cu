// residual_layer_norm v3_registers: a warp a row, up to 4 KB, in registers
//
// Idea      layer_norm's v3 with the residual added where the row is loaded: all of x and of the residual is in flight
//           before the first sum is taken. x_bias and dropout change x when it has come. The sum is held as floats:
//           rounded it would be less exact.
// Since v2  A warp takes a row up to 4 KB, without a barrier; wider rows take a block with two instead of six. Weight
//           and bias are asked for all at once, but for rows of 512 threads.
// Launch    as layer_norm's v3_registers, but always dependent (step2/dependent_launch.h): what is in front of it in a
//           block of GPT-2 is step 2's product, which mostly lets it begin
// Moves     4·rows·width·sizeof(T) bytes; about 11·rows·width FLOPs. With x_bias width·sizeof(T) more (after the first
//           rows it comes from cache); dropout moves nothing
// Limits    width ≤ 16384 (float64: 8192), rows ≤ 2³¹−1
#include <step2/dependent_launch.h>
#include <step3/front.h>
#include <step3/held_row.h>

#include "rungs.h"

namespace kf::KF_BACKEND::residual_layer_norm {
namespace {

// Two rows were on their way into the registers, so there is room for all of weight and bias; but not in blocks of 512,
// whose threads have 128 registers at most. In layer_norm, where one row was, fewer blocks would fit beside each other.
template <class Row>
constexpr LoadWeights kLoadWeights = Row::kThreads == 512 ? LoadWeights::kWhereNeeded : LoadWeights::kAtOnce;

template <class Row, class T, class Front, class C = compute_t<T>>
__global__ void __launch_bounds__(Row::kThreads* kRowsOfBlock<Row>)
    v3_registers_kernel(const T* __restrict__ x, const T* __restrict__ residual, const T* __restrict__ weight,
                        const T* __restrict__ bias, T* __restrict__ y, T* __restrict__ sum, Kept<C> kept, int64_t rows,
                        int width, C eps, Front front) {
  launch_dependent_grids();
  wait_on_dependent_grids();  // x is there
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
  const HeldValues<Row, C> get{value};
  const Statistics<C> s = held_statistics<Row>(get, width, eps, shared);
  if (threadIdx.x == 0) kept.keep(row, s);
  store_pieces<Row, kLoadWeights<Row>>(get, s, width, weight, bias, y + first);
}

}  // namespace

std::string v3_registers_can_implement(const Args& a) { return too_many_or_too_wide_to_hold(a.rows, a.width, a.dtype); }

void v3_registers(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const bool vectors = aligned_16(a.x, a.residual, a.weight, a.bias, a.y, a.sum, a.x_bias);
    with_held_row<T>(a.width, vectors, [&](auto shape) {
      using Row = decltype(shape);
      constexpr int kRows = kRowsOfBlock<Row>;
      with_front<T>(a, [&](auto front) {
        launch_dependent(v3_registers_kernel<Row, T, decltype(front)>, static_cast<unsigned>(ceil_div(a.rows, kRows)),
                         dim3(Row::kThreads, kRows), 0, stream, static_cast<const T*>(a.x),
                         static_cast<const T*>(a.residual), static_cast<const T*>(a.weight),
                         static_cast<const T*>(a.bias), static_cast<T*>(a.y), static_cast<T*>(a.sum), kept_of<T>(a),
                         a.rows, static_cast<int>(a.width), static_cast<compute_t<T>>(a.eps), front);
      });
    });
  });
}

}  // namespace kf::KF_BACKEND::residual_layer_norm
