// linear v2_tiled: tiles of x and weight in shared memory
//
// Idea      The 32 × 32 outputs of a block need the same 32 rows of x and 32 columns of the weight. The block loads
//           them in tiles of 32 × 32, each element once, and every thread then takes its 64 factors from shared memory.
// Since v1  Each element is loaded from global memory once for 32 outputs, not once for each. Threads fetch neighbours
//           in memory, also where an operand is transposed.
// Launch    grid (⌈width/32⌉, ⌈rows/32⌉), block 32×32, 8.4 KB shared memory (float64: 16.9)
// Moves     (rows·depth + depth·width + rows·width + width)·sizeof(T) bytes at the least; 2·rows·depth·width FLOPs.
//           From caches 2·rows·depth·width·sizeof(T)/32 bytes: 16 FLOP a byte in half types, 8 in float32. From shared
//           memory 8 bytes for each multiply-add, 1/4 FLOP a byte: that is the limit now
// Limits    rows ≤ 32·65535, width ≤ 32·(2³¹−1)
#include "operands.h"

namespace kf::KF_BACKEND::linear {
namespace {

constexpr int kTile = 32;

template <class T, class C = compute_t<T>>
__global__ void v2_tiled_kernel(Matrix<T> x, Matrix<T> weight, const T* __restrict__ bias, T* __restrict__ y,
                                int64_t rows, int64_t depth, int64_t width) {
  __shared__ C x_tile[kTile][kTile + 1];       // [row][k]; one column of padding: threads may also fetch down a column
  __shared__ C weight_tile[kTile][kTile + 1];  // [k][column]
  const int tx = threadIdx.x, ty = threadIdx.y;
  const int64_t first_row = int64_t{blockIdx.y} * kTile, first_column = int64_t{blockIdx.x} * kTile;

  C sum = 0;
  for (int64_t first_k = 0; first_k < depth; first_k += kTile) {
    // threadIdx.x goes along the neighbours in memory. What lies beyond the edges counts as 0.
    const int r = x.column == 1 ? ty : tx, x_k = x.column == 1 ? tx : ty;
    const bool x_inside = first_row + r < rows && first_k + x_k < depth;
    x_tile[r][x_k] = x_inside ? to_compute(x.at(first_row + r, first_k + x_k)) : C(0);
    const int c = weight.column == 1 ? tx : ty, weight_k = weight.column == 1 ? ty : tx;
    const bool weight_inside = first_k + weight_k < depth && first_column + c < width;
    weight_tile[weight_k][c] = weight_inside ? to_compute(weight.at(first_k + weight_k, first_column + c)) : C(0);
    __syncthreads();  // the tiles are whole

#pragma unroll
    for (int k = 0; k < kTile; ++k) sum += x_tile[ty][k] * weight_tile[k][tx];
    __syncthreads();  // all have read: the next tiles may come
  }
  const int64_t row = first_row + ty, column = first_column + tx;
  if (row < rows && column < width) y[row * width + column] = from_compute<T>(sum + bias_at(bias, column));
}

}  // namespace

std::string v2_tiled_can_implement(const Args& a) { return can_implement_grid<kTile, kTile>(a); }

void v2_tiled(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const dim3 grid(static_cast<unsigned>(ceil_div(a.width, kTile)), static_cast<unsigned>(ceil_div(a.rows, kTile)));
    v2_tiled_kernel<T><<<grid, dim3(kTile, kTile), 0, as_stream(stream)>>>(
        x_of<T>(a), weight_of<T>(a), static_cast<const T*>(a.bias), static_cast<T*>(a.y), a.rows, a.depth, a.width);
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::linear
