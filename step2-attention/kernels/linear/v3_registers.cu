// linear v3_registers: 64 outputs a thread, in registers
//
// Idea      Of 8 elements of x and 8 of the weight, 16 loads from shared memory, a thread can make 64 products: all
//           pairs. So it computes 8 × 8 outputs, which stay in registers, and shared memory is asked for a quarter of
//           an element a multiply-add instead of two.
// Since v2  A block computes 128 × 128 outputs with 256 threads, over 8 of the depth at a time. A thread's rows and
//           columns are 16 apart, so that neighbouring threads read neighbouring words.
// Launch    grid (⌈width/128⌉, ⌈rows/128⌉), block 256, 8.4 KB shared memory (float64: 16.9)
// Moves     (rows·depth + depth·width + rows·width + width)·sizeof(T) bytes at the least; 2·rows·depth·width FLOPs.
//           From caches 2·rows·depth·width·sizeof(T)/128 bytes: 64 FLOP a byte in half types, 32 in float32. From
//           shared memory 1 byte for each multiply-add, 2 FLOP a byte
// Limits    rows ≤ 128·65535, width ≤ 128·(2³¹−1)
#include "operands.h"

namespace kf::KF_BACKEND::linear {
namespace {

constexpr int kTile = 128, kDepth = 8, kThreads = 256, kEach = 8, kApart = kTile / kEach;
constexpr int kStride = kTile + 4;  // of the padding: eight k and four rows side by side lie in all 32 banks

// Fetches 128 × 8 elements as [k][i], i along the rows of x or the columns of the weight.
template <class T, class C>
__device__ void load_tile(const Matrix<T>& m, int64_t first, int64_t end, int64_t first_k, int64_t depth,
                          C (&tile)[kDepth][kStride]) {
#pragma unroll
  for (int e = threadIdx.x; e < kTile * kDepth; e += kThreads) {
    const int i = m.row == 1 ? e % kTile : e / kDepth, k = m.row == 1 ? e / kTile : e % kDepth;
    const bool inside = first + i < end && first_k + k < depth;
    tile[k][i] = inside ? to_compute(m.at(first + i, first_k + k)) : C(0);
  }
}

template <class T, class C = compute_t<T>>
__global__ void __launch_bounds__(kThreads)
    v3_registers_kernel(Matrix<T> x, Matrix<T> weight_columns, const T* __restrict__ bias, T* __restrict__ y,
                        int64_t rows, int64_t depth, int64_t width) {
  __shared__ C x_tile[kDepth][kStride], weight_tile[kDepth][kStride];
  const int64_t first_row = int64_t{blockIdx.y} * kTile, first_column = int64_t{blockIdx.x} * kTile;
  const int tx = threadIdx.x % kApart, ty = threadIdx.x / kApart;

  C sum[kEach][kEach] = {};
  for (int64_t first_k = 0; first_k < depth; first_k += kDepth) {
    load_tile(x, first_row, rows, first_k, depth, x_tile);
    load_tile(weight_columns, first_column, width, first_k, depth, weight_tile);
    __syncthreads();  // the tiles are whole
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      C of_x[kEach], of_weight[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        of_x[i] = x_tile[k][ty + i * kApart];
        of_weight[i] = weight_tile[k][tx + i * kApart];
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) sum[i][j] += of_x[i] * of_weight[j];
      }
    }
    __syncthreads();  // all have read: the next tiles may come
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int64_t row = first_row + ty + i * kApart, column = first_column + tx + j * kApart;
      if (row < rows && column < width) y[row * width + column] = from_compute<T>(sum[i][j] + bias_at(bias, column));
    }
  }
}

}  // namespace

std::string v3_registers_can_implement(const Args& a) { return can_implement_grid<kTile, kTile>(a); }

void v3_registers(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const dim3 grid(static_cast<unsigned>(ceil_div(a.width, kTile)), static_cast<unsigned>(ceil_div(a.rows, kTile)));
    v3_registers_kernel<T><<<grid, kThreads, 0, as_stream(stream)>>>(x_of<T>(a), weight_columns_of<T>(a),
                                                                     static_cast<const T*>(a.bias),
                                                                     static_cast<T*>(a.y), a.rows, a.depth, a.width);
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::linear
