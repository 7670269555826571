// wgmma; and with TMA and mbarriers a whole matrix product.
#include <step2/mbarrier.h>
#include <step2/tensor_map.h>
#include <step2/tma.h>
#include <step2/wgmma.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "ptx_test.h"

namespace kf::KF_BACKEND {
namespace {

// ---- wgmma ----

// Bytes of a row.
__host__ __device__ constexpr uint32_t width_of(Swizzle swizzle) { return 16u << static_cast<int>(swizzle); }

// Where element (row, k) of an operand lies, in bytes; `row` is a row of A or a column of B. See matrix_descriptor.
struct Layout {
  Major major;
  Swizzle swizzle;
  uint32_t leading, stride;

  __host__ __device__ uint32_t offset(uint32_t row, uint32_t k) const {
    const uint32_t width = width_of(swizzle);
    if (major == Major::kK) {
      if (swizzle == Swizzle::kNone) return k / 8 * leading + row / 8 * stride + row % 8 * 16 + k % 8 * 2;
      return swizzled_offset(row / 8 * stride + row % 8 * width + k * 2, swizzle);
    }
    if (swizzle == Swizzle::kNone) return row / 8 * stride + k / 8 * leading + k % 8 * 16 + row % 8 * 2;
    const uint32_t across = width / 2;
    return swizzled_offset(row / across * leading + k / 8 * stride + k % 8 * width + row % across * 2, swizzle);
  }
};

// The tile of `rows` rows, dense.
Layout layout_of(Major major, Swizzle swizzle, uint32_t rows) {
  const uint32_t width = width_of(swizzle);
  if (major == Major::kK) return {major, swizzle, rows * 16, 8 * width};
  if (swizzle == Swizzle::kNone) return {major, swizzle, 128, 256};
  return {major, swizzle, 16 * width, 8 * width};
}
// How many such steps of 16 along k a k-major tile holds in one width of its swizzle.
constexpr int slices(Swizzle swizzle) { return swizzle == Swizzle::k128 ? 4 : swizzle == Swizzle::k64 ? 2 : 1; }

constexpr uint32_t kTileA = 16 * 1024, kTileB = 64 * 1024;

// d = c + a · b or a · b: a 64 × 16, b 16 × N, row after row. `slice`: which step of 16 of the tile holds them.
template <int N, class T, Major kA, Major kB, bool kRegisters>
__global__ void wgmma_kernel(const T* a, const T* b, const float* c, float* d, Layout layout_a, Layout layout_b,
                             int slice_a, int slice_b, bool accumulate) {
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* const tile_a = aligned_shared(shared);
  unsigned char* const tile_b = tile_a + kTileA;
  for (uint32_t i = threadIdx.x; i < 64 * 16; i += 128) {
    memcpy(tile_a + layout_a.offset(i / 16, i % 16 + 16 * slice_a), a + i, 2);
  }
  for (uint32_t i = threadIdx.x; i < 16 * N; i += 128) {
    memcpy(tile_b + layout_b.offset(i % N, i / N + 16 * slice_b), b + i, 2);
  }
  tma_store_fence();
  __syncthreads();

  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float sum[N / 2];
  for (int i = 0; i < N / 2; ++i) sum[i] = c[(16 * warp + g + 8 * (i / 2 % 2)) * N + 8 * (i / 4) + 2 * t + i % 2];
  const uint64_t right = matrix_descriptor(tile_b + 32 * slice_b, layout_b.leading, layout_b.stride, layout_b.swizzle);
  if constexpr (kRegisters) {
    uint32_t left[4];
    for (int i = 0; i < 4; ++i) left[i] = pair_at(a + (16 * warp + g + 8 * (i % 2)) * 16 + 2 * t + 8 * (i / 2));
    wgmma_fence();
    wgmma<N, T, kB>(sum, left, right, accumulate);
  } else {
    const uint64_t left = matrix_descriptor(tile_a + 32 * slice_a, layout_a.leading, layout_a.stride, layout_a.swizzle);
    wgmma_fence();
    wgmma<N, T, kA, kB>(sum, left, right, accumulate);
  }
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; i < N / 2; ++i) d[(16 * warp + g + 8 * (i / 2 % 2)) * N + 8 * (i / 4) + 2 * t + i % 2] = sum[i];
}

template <int N, class T, Major kA, Major kB, bool kRegisters = false>
void test_wgmma() {
  const Memory<T> a(64 * 16), b(16 * N);
  const Memory<float> c(64 * N), d(64 * N), zero(64 * N);
  for (size_t i = 0; i < zero.size(); ++i) zero[i] = 0;
  constexpr int kShared = kTileA + kTileB + 1024;
  auto* const kernel = wgmma_kernel<N, T, kA, kB, kRegisters>;
  allow_shared(kernel, kShared);
  for (const Swizzle swizzle : {Swizzle::kNone, Swizzle::k32, Swizzle::k64, Swizzle::k128}) {
    const int slices_a = kA == Major::kK && !kRegisters ? slices(swizzle) : 1;
    const int slices_b = kB == Major::kK ? slices(swizzle) : 1;
    for (int slice = 0; slice < std::max(slices_a, slices_b); ++slice) {
      SCOPED_TRACE("N " + std::to_string(N) + ", A " +
                   (kRegisters        ? "in registers"
                    : kA == Major::kK ? "k-major"
                                      : "m-major") +
                   ", B " + (kB == Major::kK ? "k-major" : "n-major") + ", swizzle " +
                   std::to_string(static_cast<int>(swizzle)) + ", slice " + std::to_string(slice));
      const Layout layout_a = layout_of(kA, swizzle, 64), layout_b = layout_of(kB, swizzle, N);
      const int slice_a = slice % slices_a, slice_b = slice % slices_b;
      fill_whole(a, 1), fill_whole(b, 2), fill_whole(c, 3);
      kernel<<<1, 128, kShared>>>(a.get(), b.get(), c.get(), d.get(), layout_a, layout_b, slice_a, slice_b, true);
      finish();
      ASSERT_NO_FATAL_FAILURE(expect_product(d, product(a, b, c, 64, N, 16), N, 0));
      print_checksum(d);
      kernel<<<1, 128, kShared>>>(a.get(), b.get(), c.get(), d.get(), layout_a, layout_b, slice_a, slice_b, false);
      finish();
      ASSERT_NO_FATAL_FAILURE(expect_product(d, product(a, b, zero, 64, N, 16), N, 0));
      fill_normal(a, 4), fill_normal(b, 5), fill_normal(c, 6);
      kernel<<<1, 128, kShared>>>(a.get(), b.get(), c.get(), d.get(), layout_a, layout_b, slice_a, slice_b, true);
      finish();
      ASSERT_NO_FATAL_FAILURE(expect_product(d, product(a, b, c, 64, N, 16), N, 2e-5));
    }
  }
}

template <class Width>
class WgmmaOfWidth : public On<901> {};
template <int... N>
using Widths = testing::Types<std::integral_constant<int, N>...>;
using AllWidths = Widths<32, 64, 128, 192, 256>;
TYPED_TEST_SUITE(WgmmaOfWidth, AllWidths);
TYPED_TEST(WgmmaOfWidth, TakesBInEitherMajor) {
  test_wgmma<TypeParam::value, Bf16, Major::kK, Major::kK>();
  test_wgmma<TypeParam::value, Bf16, Major::kK, Major::kMN>();
}

using Wgmma = On<901>;
TEST_F(Wgmma, TakesAInEitherMajor) {
  test_wgmma<64, Bf16, Major::kMN, Major::kK>();
  test_wgmma<64, Bf16, Major::kMN, Major::kMN>();
}
TEST_F(Wgmma, TakesFloat16) {
  test_wgmma<64, __half, Major::kK, Major::kK>();
  test_wgmma<128, __half, Major::kMN, Major::kMN>();
}
TEST_F(Wgmma, TakesAFromRegisters) {
  test_wgmma<64, Bf16, Major::kK, Major::kK, true>();
  test_wgmma<128, Bf16, Major::kK, Major::kMN, true>();
  test_wgmma<256, __half, Major::kK, Major::kMN, true>();
}

// ---- all together: a matrix product with a warp that loads and a warpgroup that multiplies ----

constexpr int kStages = 3, kRows = 64, kCols = 128, kDepth = 64;
constexpr uint32_t kBytesA = kRows * kDepth * 2, kBytesB = kCols * kDepth * 2;

// c = a · bᵀ: a M × K, b N × K, row after row. Thread 128 loads tiles of 64 along k, three ahead; threads 0 to 127
// multiply.
__global__ void pipeline_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                                float* c, int n, int k) {
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* const stages = aligned_shared(shared);
  __shared__ uint64_t full[kStages], empty[kStages];
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(&full[s], 1);
      mbarrier_init(&empty[s], 1);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const int row = blockIdx.y * kRows, col = blockIdx.x * kCols, steps = k / kDepth;
  if (threadIdx.x >= 128) {
    for (int step = 0; threadIdx.x == 128 && step < steps; ++step) {
      const int s = step % kStages;
      mbarrier_wait(&empty[s], (step / kStages & 1) ^ 1);
      unsigned char* const tile = stages + s * (kBytesA + kBytesB);
      mbarrier_arrive_expect_tx(&full[s], kBytesA + kBytesB);
      tma_load(tile, &map_a, &full[s], step * kDepth, row);
      tma_load(tile + kBytesA, &map_b, &full[s], step * kDepth, col);
    }
    return;
  }
  float sum[kCols / 2] = {};
  for (int step = 0; step < steps; ++step) {
    const int s = step % kStages;
    mbarrier_wait(&full[s], step / kStages & 1);
    const unsigned char* const tile = stages + s * (kBytesA + kBytesB);
    wgmma_fence();
    for (int slice = 0; slice < kDepth / 16; ++slice) {
      const uint64_t left = matrix_descriptor(tile + 32 * slice, 16, 1024, Swizzle::k128);
      const uint64_t right = matrix_descriptor(tile + kBytesA + 32 * slice, 16, 1024, Swizzle::k128);
      wgmma<kCols, Bf16>(sum, left, right, true);
    }
    wgmma_commit();
    wgmma_wait<0>();  // now all four warps have read the tiles, and one thread may say so
    if (threadIdx.x == 0) mbarrier_arrive(&empty[s]);
  }
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int i = 0; i < kCols / 2; ++i) {
    c[(row + 16 * warp + g + 8 * (i / 2 % 2)) * n + col + 8 * (i / 4) + 2 * t + i % 2] = sum[i];
  }
}

using PipelineTest = On<901>;
TEST_F(PipelineTest, MultipliesMatrices) {
  const int m = 128, n = 256, k = 448;
  const Memory<Bf16> a(m * k), b(n * k);
  const Memory<float> c(m * n);
  fill_whole(a, 8), fill_whole(b, 9);
  const CUtensorMap map_a =
      make_tensor_map<Bf16, 2>(a.get(), {uint64_t{k}, uint64_t{m}}, {uint64_t{k} * 2}, {kDepth, kRows}, Swizzle::k128);
  const CUtensorMap map_b =
      make_tensor_map<Bf16, 2>(b.get(), {uint64_t{k}, uint64_t{n}}, {uint64_t{k} * 2}, {kDepth, kCols}, Swizzle::k128);
  constexpr int kShared = kStages * (kBytesA + kBytesB) + 1024;
  allow_shared(pipeline_kernel, kShared);
  pipeline_kernel<<<dim3(n / kCols, m / kRows), 160, kShared>>>(map_a, map_b, c.get(), n, k);
  finish();
  for (int row = 0; row < m; ++row) {
    for (int col = 0; col < n; ++col) {
      float sum = 0;
      for (int i = 0; i < k; ++i) sum += to_float(a[row * k + i]) * to_float(b[col * k + i]);
      ASSERT_EQ(c[row * n + col], sum) << "row " << row << ", column " << col;
    }
  }
  print_checksum(c);
}

}  // namespace
}  // namespace kf::KF_BACKEND
