// A warp's matrices: mma.sync, ldmatrix and stmatrix.
#include <step2/mma.h>

#include <cstring>

#include "ptx_test.h"

namespace kf::KF_BACKEND {
namespace {

// ---- mma.sync ----

// d = c + a · b, with a 16 × 16, b 16 × 8, c and d 16 × 8, all row after row.
template <class T>
__global__ void mma_kernel(const T* a, const T* b, const float* c, float* d) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  uint32_t left[4], right[2];
  for (int i = 0; i < 4; ++i) left[i] = pair_at(a + (g + 8 * (i % 2)) * 16 + 2 * t + 8 * (i / 2));
  for (int i = 0; i < 2; ++i) right[i] = pair_at(b + (2 * t + 8 * i) * 8 + g, 8);
  float sum[4];
  for (int i = 0; i < 4; ++i) sum[i] = c[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2];
  mma_m16n8k16<T>(sum, left, right);
  for (int i = 0; i < 4; ++i) d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = sum[i];
}

__global__ void mma_tf32_kernel(const float* a, const float* b, const float* c, float* d) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  uint32_t left[4], right[2];
  for (int i = 0; i < 4; ++i) left[i] = to_tf32(a[(g + 8 * (i % 2)) * 8 + t + 4 * (i / 2)]);
  for (int i = 0; i < 2; ++i) right[i] = to_tf32(b[(t + 4 * i) * 8 + g]);
  float sum[4];
  for (int i = 0; i < 4; ++i) sum[i] = c[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2];
  mma_m16n8k8_tf32(sum, left, right);
  for (int i = 0; i < 4; ++i) d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = sum[i];
}

template <class T>
class Mma : public testing::Test {};
using HalfTypes = testing::Types<Bf16, __half>;
TYPED_TEST_SUITE(Mma, HalfTypes);

TYPED_TEST(Mma, MultipliesWholeNumbersExactlyAndAddsUpInFloat32) {
  using T = TypeParam;
  const Memory<T> a(16 * 16), b(16 * 8);
  const Memory<float> c(16 * 8), d(16 * 8);
  const auto multiply = [&](double tolerance) {
    mma_kernel<T><<<1, 32>>>(a.get(), b.get(), c.get(), d.get());
    finish();
    expect_product(d, product(a, b, c, 16, 8, 16), 8, tolerance);
  };
  fill_whole(a, 1), fill_whole(b, 2), fill_whole(c, 3);
  multiply(0);
  print_checksum(d);
  fill_normal(a, 1), fill_normal(b, 2), fill_normal(c, 3);
  multiply(1e-5);
}

TEST(MmaTf32, MultipliesWholeNumbersExactly) {
  const Memory<float> a(16 * 8), b(8 * 8), c(16 * 8), d(16 * 8);
  fill_whole(a, 1), fill_whole(b, 2), fill_whole(c, 3);
  mma_tf32_kernel<<<1, 32>>>(a.get(), b.get(), c.get(), d.get());
  finish();
  expect_product(d, product(a, b, c, 16, 8, 8), 8, 0);
  print_checksum(d);
}

TEST(MmaTf32, RoundsItsInputsToElevenBits) {
  const Memory<float> a(16 * 8), b(8 * 8), c(16 * 8), d(16 * 8);
  fill_normal(a, 1), fill_normal(b, 2), fill_normal(c, 3);
  mma_tf32_kernel<<<1, 32>>>(a.get(), b.get(), c.get(), d.get());
  finish();
  const auto rounded = [](float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits = (bits + 0x1000u) & ~0x1fffu;
    std::memcpy(&x, &bits, 4);
    return x;
  };
  for (size_t i = 0; i < a.size(); ++i) a[i] = rounded(a[i]);
  for (size_t i = 0; i < b.size(); ++i) b[i] = rounded(b[i]);
  expect_product(d, product(a, b, c, 16, 8, 8), 8, 1e-5);
}

// ---- ldmatrix, stmatrix ----

// 32 rows of 8 elements in shared memory; what each lane gets of N matrices.
template <int N, bool kTransposed>
__global__ void ldmatrix_kernel(const uint16_t* in, uint32_t* out) {
  __shared__ __align__(16) uint16_t rows[32][8];
  for (int i = 0; i < 8; ++i) rows[threadIdx.x][i] = in[threadIdx.x * 8 + i];
  __syncwarp();
  uint32_t held[N];
  if constexpr (kTransposed) {
    ldmatrix_transposed<N>(held, rows[threadIdx.x]);
  } else {
    ldmatrix<N>(held, rows[threadIdx.x]);
  }
  for (int i = 0; i < N; ++i) out[i * 32 + threadIdx.x] = held[i];
}

template <int N, bool kTransposed>
__global__ void stmatrix_kernel(const uint32_t* in, uint16_t* out) {
  __shared__ __align__(16) uint16_t rows[32][8];
  for (int i = 0; i < 8; ++i) rows[threadIdx.x][i] = 0;
  __syncwarp();
  uint32_t held[N];
  for (int i = 0; i < N; ++i) held[i] = in[i * 32 + threadIdx.x];
  if constexpr (kTransposed) {
    stmatrix_transposed<N>(rows[threadIdx.x], held);
  } else {
    stmatrix<N>(rows[threadIdx.x], held);
  }
  __syncwarp();
  for (int i = 0; i < 8; ++i) out[threadIdx.x * 8 + i] = rows[threadIdx.x][i];
}

// What lane `lane` holds of matrix `matrix`.
uint32_t held_by(const Memory<uint16_t>& rows, int matrix, int lane, bool transposed) {
  const int g = lane / 4, t = lane % 4;
  const auto element = [&](int row, int col) { return uint32_t{rows[(8 * matrix + row) * 8 + col]}; };
  return transposed ? element(2 * t, g) | element(2 * t + 1, g) << 16 : element(g, 2 * t) | element(g, 2 * t + 1) << 16;
}

template <int kCount, bool kTurned>
struct Matrices {
  static constexpr int N = kCount;
  static constexpr bool kTransposed = kTurned;
};
template <class Of>
class MatricesTest : public On<900> {};
using Counts = testing::Types<Matrices<1, false>, Matrices<2, false>, Matrices<4, false>, Matrices<1, true>,
                              Matrices<2, true>, Matrices<4, true>>;
TYPED_TEST_SUITE(MatricesTest, Counts);

TYPED_TEST(MatricesTest, GoThereAndBack) {
  constexpr int N = TypeParam::N;
  constexpr bool kTransposed = TypeParam::kTransposed;
  const Memory<uint16_t> rows(32 * 8), back(32 * 8);
  const Memory<uint32_t> held(N * 32);
  fill_bits(rows);
  ldmatrix_kernel<N, kTransposed><<<1, 32>>>(rows.get(), held.get());
  finish();
  for (int matrix = 0; matrix < N; ++matrix) {
    for (int lane = 0; lane < 32; ++lane) {
      ASSERT_EQ(held[matrix * 32 + lane], held_by(rows, matrix, lane, kTransposed))
          << "ldmatrix x" << N << ", matrix " << matrix << ", lane " << lane;
    }
  }
  stmatrix_kernel<N, kTransposed><<<1, 32>>>(held.get(), back.get());
  finish();
  for (int i = 0; i < 32 * 8; ++i) {
    ASSERT_EQ(back[i], i < N * 64 ? rows[i] : 0) << "stmatrix x" << N << ", row " << i / 8 << ", column " << i % 8;
  }
  print_checksum(held);
  print_checksum(back);
}

}  // namespace
}  // namespace kf::KF_BACKEND
