// layer_norm v2_block: a block a row, the row read once
//
// Idea      A row fits into the registers of a block: 768 halves are 96 vectors of 16 bytes. Read it once, by 128-bit
//           loads; mean, variance and result then come from registers. A block has more threads than a warp, so its
//           loads are all in flight at the same time; the price is that sums now cross warps, by shared memory.
// Since v1  One read instead of three. Vectors instead of single elements, where the width is a multiple of
//           16/sizeof(T) and all pointers start at a multiple of 16 bytes; otherwise the vectors have one element.
// Launch    grid rows; block ⌈width/N⌉ threads in whole warps, N elements each, up to 256 threads; wider rows give
//           each thread 8 values (float64: 4) and take up to 1024 threads; 128 bytes of shared memory (float64: 256)
// Moves     2·rows·width·sizeof(T) bytes; about 10·rows·width FLOPs
// Limits    width ≤ 8192 (float64: 4096), rows ≤ 2³¹−1
//           On an H200 it is ahead of v1 in half types up to 1024 wide at 16384 rows and from 4096 wide, and behind in
//           float32 and at 1600: v1's second and third read come from cache, and its warps need no barriers.
#include <step3/row.h>

#include "rungs.h"

namespace kf::KF_BACKEND::layer_norm {
namespace {

template <int kItems, int N, class T, class C = compute_t<T>>
__global__ void __launch_bounds__(kMostRowThreads, 1)
    v2_block_kernel(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                    T* __restrict__ y, Kept<C> kept, int width, C eps) {
  __shared__ C shared[kWarpSize];
  x += int64_t{blockIdx.x} * width;
  y += int64_t{blockIdx.x} * width;

  C value[kItems][N] = {};
  for_each_vector<kItems, N>(width, [&](int i, int column) {
    const Vector<T, N> v = load_vector<N>(x + column);
#pragma unroll
    for (int j = 0; j < N; ++j) value[i][j] = to_compute(v.element[j]);
  });
  const Statistics<C> s = block_statistics<kItems, N>(value, width, eps, shared);
  if (threadIdx.x == 0) kept.keep(blockIdx.x, s);
  store_normalized<kItems, N>(value, s, width, weight, bias, y);
}

}  // namespace

std::string v2_block_can_implement(const Args& a) { return too_many_or_too_wide(a.rows, a.width, a.dtype); }

void v2_block(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    with_row_shape<T>(a.width, aligned_16(a.x, a.weight, a.bias, a.y), [&](auto items, auto n, unsigned threads) {
      v2_block_kernel<decltype(items)::value, decltype(n)::value, T>
          <<<static_cast<unsigned>(a.rows), threads, 0, as_stream(stream)>>>(
              static_cast<const T*>(a.x), static_cast<const T*>(a.weight), static_cast<const T*>(a.bias),
              static_cast<T*>(a.y), kept_of<T>(a), static_cast<int>(a.width), static_cast<compute_t<T>>(a.eps));
    });
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::layer_norm
