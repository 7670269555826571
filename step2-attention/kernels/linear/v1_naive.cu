// linear v1_naive: a thread an output
//
// Idea      y[r, c] is a row of x times a column of the weight. A thread walks along both. Neighbouring threads have
//           neighbouring columns: they read the same x and neighbouring weights.
// Launch    grid (⌈width/32⌉, ⌈rows/8⌉), block 32×8
// Moves     (rows·depth + depth·width + rows·width + width)·sizeof(T) bytes at the least; 2·rows·depth·width FLOPs.
//           For each multiply-add two elements are loaded, from caches. A warp shares that of x, so there remain
//           rows·depth·width·sizeof(T) bytes: 1 FLOP a byte in half types, half of one in float32
// Limits    rows ≤ 8·65535, width ≤ 32·(2³¹−1)
#include "operands.h"

namespace kf::KF_BACKEND::linear {
namespace {

constexpr int kColumns = 32, kRows = 8;

template <class T>
__global__ void v1_naive_kernel(Matrix<T> x, Matrix<T> weight, const T* __restrict__ bias, T* __restrict__ y,
                                int64_t rows, int64_t depth, int64_t width) {
  const int64_t column = int64_t{blockIdx.x} * kColumns + threadIdx.x;
  const int64_t row = int64_t{blockIdx.y} * kRows + threadIdx.y;
  if (row >= rows || column >= width) return;
  compute_t<T> sum = 0;
  for (int64_t k = 0; k < depth; ++k) sum += to_compute(x.at(row, k)) * to_compute(weight.at(k, column));
  y[row * width + column] = from_compute<T>(sum + bias_at(bias, column));
}

}  // namespace

std::string v1_naive_can_implement(const Args& a) { return can_implement_grid<kRows, kColumns>(a); }

void v1_naive(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const dim3 grid(static_cast<unsigned>(ceil_div(a.width, kColumns)), static_cast<unsigned>(ceil_div(a.rows, kRows)));
    v1_naive_kernel<T><<<grid, dim3(kColumns, kRows), 0, as_stream(stream)>>>(
        x_of<T>(a), weight_of<T>(a), static_cast<const T*>(a.bias), static_cast<T*>(a.y), a.rows, a.depth, a.width);
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::linear
