// linear v11_gemv: up to four rows, on CUDA cores, at the weight's bytes
//
// Idea      With one row there is nothing to share: every element of the weight is used once. So no shared memory and
//           no tensor cores: each thread loads vectors of the weight, several in flight, and multiplies them by numbers
//           of x, which come from cache. It runs on any GPU and in any type.
// Since v4  No tiles. [depth, width]: kLanes neighbouring threads take as many vectors of a row of the weight, the
//           next kLanes the row below, and the block goes down the depth; its sums meet by shuffles, then in shared
//           memory. Fewer lanes make more blocks, down to 32 bytes of a row, the least that memory delivers.
//           [width, depth], transposed: a warp takes a column of the weight, a row in memory, and adds up its lanes'
//           sums by shuffles.
// Launch    C = kLanes vectors of 16 bytes, kLanes = 16, 4 or 2: the first that gives half of the multiprocessors a
//           block (32 columns where vectors cannot be used): grid ⌈width/C⌉, block 512, up to 32 KB shared memory;
//           transposed: grid ⌈width/16⌉, none
// Moves     (rows·depth + depth·width + rows·width + width)·sizeof(T) bytes; 2·rows·depth·width FLOPs: in half types
//           1 FLOP for each byte of the weight and each row
// Limits    rows ≤ 4, width ≤ 16·(2³¹−1); x not transposed
#include <step1/vector.h>
#include <step2/reduce.h>

#include "operands.h"
#include "rungs.h"

namespace kf::KF_BACKEND::linear {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / kWarpSize, kMostRows = 4;

// The weight's rows in memory go along the width.
template <int kRows, int N, int kLanes, class T, class C = compute_t<T>>
__global__ void __launch_bounds__(kThreads)
    v11_gemv_kernel(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                    T* __restrict__ y, int rows, int64_t depth, int64_t width) {
  constexpr int kColumns = kLanes * N;
  __shared__ C of_warps[kWarps][kRows][kColumns];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t first = int64_t{blockIdx.x} * kColumns, column = first + threadIdx.x % kLanes * N;

  C sum[kRows][N] = {};
  if (column < width) {
#pragma unroll 4
    for (int64_t k = threadIdx.x / kLanes; k < depth; k += kThreads / kLanes) {
      C w[N];
      widen(load_vector<N>(weight + k * width + column), w);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const C factor = r < rows ? to_compute(x[r * depth + k]) : C(0);
#pragma unroll
        for (int j = 0; j < N; ++j) sum[r][j] += factor * w[j];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
#pragma unroll
      for (int apart = kWarpSize / 2; apart >= kLanes; apart /= 2) {  // lanes of the same columns
        sum[r][j] += __shfl_xor_sync(kFullWarp, sum[r][j], apart);
      }
      if (lane < kLanes) of_warps[warp][r][lane * N + j] = sum[r][j];
    }
  }
  __syncthreads();  // the warps' sums are there
  for (int e = threadIdx.x; e < rows * kColumns; e += kThreads) {
    const int r = e / kColumns, c = e % kColumns;
    if (first + c >= width) continue;
    C total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += of_warps[w][r][c];
    y[r * width + first + c] = from_compute<T>(total + bias_at(bias, first + c));
  }
}

// The weight's rows in memory go along the depth: a warp a column.
template <int kRows, int N, class T, class C = compute_t<T>>
__global__ void __launch_bounds__(kThreads)
    v11_gemv_transposed_kernel(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                               T* __restrict__ y, int rows, int64_t depth, int64_t width) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t column = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  if (column >= width) return;
  C sum[kRows] = {};
#pragma unroll 2
  for (int64_t k = lane * N; k < depth; k += kWarpSize * N) {
    C w[N];
    widen(load_vector<N>(weight + column * depth + k), w);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows) break;
      C factor[N];
      widen(load_vector<N>(x + r * depth + k), factor);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[r] += factor[j] * w[j];
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const C total = warp_sum(sum[r]);
    if (r < rows && lane == 0) y[r * width + column] = from_compute<T>(total + bias_at(bias, column));
  }
}

bool vectors(const Args& a) {
  return (a.weight_transposed ? a.depth : a.width) * size_of(a.dtype) % 16 == 0 && aligned_16(a.x, a.weight);
}

template <int kRows, int N, class T>
void launch(const Args& a, void* stream) {
  const auto x = static_cast<const T*>(a.x), weight = static_cast<const T*>(a.weight);
  const auto bias = static_cast<const T*>(a.bias);
  const auto y = static_cast<T*>(a.y);
  const int rows = static_cast<int>(a.rows);
  const auto along_width = [&](auto lanes) {
    constexpr int kLanes = decltype(lanes)::value;
    v11_gemv_kernel<kRows, N, kLanes>
        <<<static_cast<unsigned>(ceil_div(a.width, kLanes * N)), kThreads, 0, as_stream(stream)>>>(
            x, weight, bias, y, rows, a.depth, a.width);
  };
  const auto enough = [&](int lanes) { return 2 * ceil_div(a.width, lanes * N) >= multiprocessors(); };
  if (a.weight_transposed) {
    v11_gemv_transposed_kernel<kRows, N>
        <<<static_cast<unsigned>(ceil_div(a.width, kWarps)), kThreads, 0, as_stream(stream)>>>(x, weight, bias, y, rows,
                                                                                               a.depth, a.width);
  } else if constexpr (N == 1) {
    along_width(std::integral_constant<int, kWarpSize>{});
  } else {
    enough(16)  ? along_width(std::integral_constant<int, 16>{})
    : enough(4) ? along_width(std::integral_constant<int, 4>{})
                : along_width(std::integral_constant<int, 2>{});
  }
  check_launch();
}

}  // namespace

std::string v11_gemv_can_implement(const Args& a) {
  if (a.x_transposed) return "takes x that is not transposed";
  if (a.rows > kMostRows) return "takes rows ≤ 4, got " + std::to_string(a.rows);
  constexpr int64_t kMost = int64_t{kWarps} * INT32_MAX;
  return a.width <= kMost ? "" : "takes width ≤ " + std::to_string(kMost) + ", got " + std::to_string(a.width);
}

void v11_gemv(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    constexpr int N = 16 / sizeof(T);
    const auto of_rows = [&](auto rows) {
      constexpr int kRows = decltype(rows)::value;
      vectors(a) ? launch<kRows, N, T>(a, stream) : launch<kRows, 1, T>(a, stream);
    };
    a.rows == 1 ? of_rows(std::integral_constant<int, 1>{}) : of_rows(std::integral_constant<int, kMostRows>{});
  });
}

}  // namespace kf::KF_BACKEND::linear
