// A tile of whole rows in a block's shared memory, all heads side by side: how many rows, and what follows attention.
#pragma once

#include <step3/attend.h>
#include <step3/front.h>
#include <step3/statistics.h>

#include <type_traits>

namespace kf::KF_BACKEND {

// Values from a row of the tile to the next: the width, filled up so that each row begins at a multiple of 16 bytes.
template <class C>
__host__ __device__ constexpr int64_t row_stride(int64_t width) {
  return ceil_div(width, kPack<C>) * kPack<C>;
}

// Rows of a tile: as many as fit, since each block reads keys, values and weights anew; but down to 4 for more blocks,
// where there are fewer of them than multiprocessors. bytes(rows) says what a block needs. 0: not even one row fits.
template <class Bytes>
int choose_tile_rows(const Attention& a, Bytes bytes) {
  const int64_t limit = shared_memory_limit();
  for (const int rows : {16, 8, 4, 1}) {
    if (bytes(rows) > limit) continue;
    if (rows <= 4 || a.batch * ceil_div(a.q_length, rows) >= multiprocessors()) return rows;
  }
  return 0;
}

// Calls f with the constant that `rows` is, one of those above.
template <class F>
void with_tile_rows(int rows, F&& f) {
  switch (rows) {
    case 16: return f(std::integral_constant<int, 16>{});
    case 8: return f(std::integral_constant<int, 8>{});
    case 4: return f(std::integral_constant<int, 4>{});
    default: return f(std::integral_constant<int, 1>{});
  }
}

// Rows `first` and following of the tensor `to`, from a tile; by the lanes that add_and_normalize_tile has for them.
template <class T, class C>
__device__ void store_tile(const C* tile, int64_t first, int64_t rows, int64_t width, T* to) {
  for (int64_t r = threadIdx.x / kWarpSize; r < rows; r += kAttendWarps) {
    for (int64_t c = threadIdx.x % kWarpSize; c < width; c += kWarpSize) {
      to[(first + r) * width + c] = from_compute<T>(tile[r * row_stride<C>(width) + c]);
    }
  }
}

// The last phase, a warp a row: what stands in front (step3/front.h), the residual's addition, LayerNorm. The tile's
// first row is row `first` of the tensors. `sum` may be null. Barriers around this are the caller's.
template <class T, class Front, class C = compute_t<T>>
__device__ void add_and_normalize_tile(C* tile, int64_t first, int64_t rows, int64_t width, Front front,
                                       const T* residual, const T* weight, const T* bias, T* sum, T* y, Kept<C> kept,
                                       C eps) {
  const int lane = threadIdx.x % kWarpSize;
  front.read();
  for (int64_t r = threadIdx.x / kWarpSize; r < rows; r += kAttendWarps) {
    C* row = tile + r * row_stride<C>(width);
    const int64_t start = (first + r) * width;
    for (int64_t c = lane; c < width; c += kWarpSize) {
      C value[1] = {row[c]};
      front.apply(start + c, c, value);
      row[c] = value[0] + to_compute(residual[start + c]);
      if (sum != nullptr) sum[start + c] = from_compute<T>(row[c]);
    }
    const auto s = warp_statistics(width, eps, [&](int64_t c) { return row[c]; });  // a lane reads what it wrote
    if (lane == 0) kept.keep(first + r, s);
    for (int64_t c = lane; c < width; c += kWarpSize) {
      y[start + c] = from_compute<T>(s.normalize(row[c]) * to_compute(weight[c]) + to_compute(bias[c]));
    }
  }
}

}  // namespace kf::KF_BACKEND
