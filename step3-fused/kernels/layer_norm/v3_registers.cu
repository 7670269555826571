// layer_norm v3_registers: a warp a row, up to 4 KB, in registers
//
// Idea      v2 pays for its block with barriers: six a row, while 96 threads wait for each other. A row of GPT-2 is
//           small enough for the registers of one warp, which needs none: 1600 bfloat16 are seven vectors a lane.
// Since v2  A warp takes a row, two or four rows a block. Wider rows take a block still, with two barriers: what the
//           second pass finds, the rest of the mean and the squares, is added up in one meeting, and each meeting has
//           shared memory of its own. Where no vector divides the width, a lane takes every 32nd value. And values are
//           held as they came, and widened anew for each pass: half types take half the registers of floats, and twice
//           as many blocks stand beside each other, of which some load while others meet. Rows of a warp that are so
//           few that registers do not matter ask for weight and bias all at once; and up to 256 begin before the
//           product in front of them has ended, if that lets them (step2/dependent_launch.h).
// Launch    A row has V = width·sizeof(T)/16 vectors. V ≤ 256: a lane holds ⌈V/32⌉ of them, block 32×4 if these are at
//           most 16 values, else 32×2, a row for each warp. Wider: grid rows, block 128, 256 or 512, the first with
//           V ≤ 8·block, a thread 4 or 8 vectors, 3 values of shared memory for each warp. Without vectors a lane holds
//           8 or 32 values, and rows of more than 1024 have a block of 64, 256 or 512
// Moves     2·rows·width·sizeof(T) bytes; about 10·rows·width FLOPs
// Limits    width ≤ 16384 (float64: 8192), rows ≤ 2³¹−1
#include <step2/dependent_launch.h>
#include <step3/held_row.h>

#include "rungs.h"

namespace kf::KF_BACKEND::layer_norm {
namespace {

template <class Row, LoadWeights kLoadWeights, class T, class C = compute_t<T>>
__global__ void __launch_bounds__(Row::kThreads* kRowsOfBlock<Row>)
    v3_registers_kernel(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                        T* __restrict__ y, Kept<C> kept, int64_t rows, int width, C eps) {
  launch_dependent_grids();
  wait_on_dependent_grids();  // x is there
  __shared__ C shared[3 * Row::kThreads / kWarpSize];
  const int64_t row = int64_t{blockIdx.x} * kRowsOfBlock<Row> + threadIdx.y;
  if (row >= rows) return;  // a whole warp; a block that takes a row has one
  x += row * width;

  Vector<T, Row::N> held[Row::kItems];  // as they came: half types take half the registers of floats
  Row::for_each_piece(width, [&](int i, int column) { held[i] = load_vector<Row::N>(x + column); });
  const auto get = [&](int i, C(&value)[Row::N]) { widen_anew(held[i], value); };
  const Statistics<C> s = held_statistics<Row>(get, width, eps, shared);
  if (threadIdx.x == 0) kept.keep(row, s);
  store_pieces<Row, kLoadWeights>(get, s, width, weight, bias, y + row * width);
}

}  // namespace

std::string v3_registers_can_implement(const Args& a) { return too_many_or_too_wide_to_hold(a.rows, a.width, a.dtype); }

void v3_registers(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    with_held_row<T>(a.width, aligned_16(a.x, a.weight, a.bias, a.y), [&](auto shape) {
      using Row = decltype(shape);
      constexpr int kRows = kRowsOfBlock<Row>;
      const auto launch = [&](auto* kernel) {
        // Few rows come from a product that lets the next launch begin: step2/few_rows.h.
        launch_dependent_if(a.rows <= 256, kernel, static_cast<unsigned>(ceil_div(a.rows, kRows)),
                            dim3(Row::kThreads, kRows), 0, stream, static_cast<const T*>(a.x),
                            static_cast<const T*>(a.weight), static_cast<const T*>(a.bias), static_cast<T*>(a.y),
                            kept_of<T>(a), a.rows, static_cast<int>(a.width), static_cast<compute_t<T>>(a.eps));
      };
      if constexpr (Row::kThreads == kWarpSize) {
        if (a.rows <= 16 * multiprocessors()) return launch(v3_registers_kernel<Row, LoadWeights::kAtOnce, T>);
      }
      launch(v3_registers_kernel<Row, LoadWeights::kWhereNeeded, T>);
    });
  });
}

}  // namespace kf::KF_BACKEND::layer_norm
