// A tile of whole rows in a block's shared memory, all heads side by side: how many rows, and what follows attention.
#pragma once

#include <step3/attend.h>
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

// The last phase: add the residual (and proj_bias, where given), then LayerNorm, a warp a row. The pointers to global
// memory stand at the tile's first row. `sum` may be null. Barriers around this are the caller's.
template <class T, class C = compute_t<T>>
__device__ void add_and_normalize_tile(C* tile, int64_t rows, int64_t width, const T* proj_bias, const T* residual,
                                       const T* weight, const T* bias, T* sum, T* y, C eps) {
  const int lane = threadIdx.x % kWarpSize;
  for (int64_t r = threadIdx.x / kWarpSize; r < rows; r += kAttendWarps) {
    C* row = tile + r * row_stride<C>(width);
    for (int64_t c = lane; c < width; c += kWarpSize) {
      row[c] += to_compute(residual[r * width + c]);
      if (proj_bias != nullptr) row[c] += to_compute(proj_bias[c]);
      if (sum != nullptr) sum[r * width + c] = from_compute<T>(row[c]);
    }
    const auto s = warp_statistics(width, eps, [&](int64_t c) { return row[c]; });  // a lane reads what it wrote
    for (int64_t c = lane; c < width; c += kWarpSize) {
      y[r * width + c] = from_compute<T>(s.normalize(row[c]) * to_compute(weight[c]) + to_compute(bias[c]));
    }
  }
}

}  // namespace kf::KF_BACKEND
