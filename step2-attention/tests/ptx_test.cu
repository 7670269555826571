// The wrappers of PTX in include/step2, each against a plain loop: emulated on the CPU, or on a GPU of compute
// capability 9.0 (compiled for 90a). With KF_PTX_CHECKSUMS=1 each test prints a checksum of what it computed exactly,
// so that two machines can be compared bit for bit.
#include <gtest/gtest.h>
#include <kf/launch.h>
#include <step2/cluster.h>
#include <step2/cp_async.h>
#include <step2/mbarrier.h>
#include <step2/mma.h>
#include <step2/tensor_map.h>
#include <step2/tma.h>
#include <step2/wgmma.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace kf::KF_BACKEND {
namespace {

using Bf16 = __nv_bfloat16;

// Memory that host and kernels both see. It holds NaN until it is written.
template <class T>
class Memory {
 public:
  explicit Memory(size_t count) : count_(count) {
    check(cudaMallocManaged(&data_, count * sizeof(T)), "cudaMallocManaged");
    std::memset(static_cast<void*>(data_), 0xff, count * sizeof(T));
  }
  ~Memory() { cudaFree(data_); }
  Memory(const Memory&) = delete;
  T* get() const { return data_; }
  T& operator[](size_t i) const { return data_[i]; }
  size_t size() const { return count_; }

 private:
  T* data_ = nullptr;
  size_t count_;
};

void finish() {
  check_launch();
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

// What the kernels were compiled for: 900 stands for compute capability 9.0, 901 for that with what only 9.0 itself
// has.
__global__ void compiled_for_kernel(int* architecture) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  *architecture = 901;
#else
  *architecture = __CUDA_ARCH__;
#endif
}
int compiled_for() {
  static const int architecture = [] {
    const Memory<int> answer(1);
    compiled_for_kernel<<<1, 1>>>(answer.get());
    finish();
    return answer[0];
  }();
  return architecture;
}
#define KF_NEEDS(architecture)                                                                                  \
  if (compiled_for() < architecture) {                                                                          \
    GTEST_SKIP() << "compiled for " << compiled_for() << "; on a GPU of compute capability 9.0 configure with " \
                 << "-D KF_CUDA_ARCHITECTURES=90a";                                                             \
  }                                                                                                             \
  static_assert(true, "")

// FNV-1a over the bytes.
template <class T>
void print_checksum(const Memory<T>& memory) {
  const char* const wanted = std::getenv("KF_PTX_CHECKSUMS");
  if (wanted == nullptr || wanted[0] == '0') return;
  uint64_t sum = 0xcbf29ce484222325;
  const auto* const bytes = reinterpret_cast<const unsigned char*>(memory.get());
  for (size_t i = 0; i < memory.size() * sizeof(T); ++i) sum = (sum ^ bytes[i]) * 0x100000001b3;
  const auto* const test = testing::UnitTest::GetInstance()->current_test_info();
  std::printf("checksum %s.%s %016llx\n", test->test_suite_name(), test->name(), static_cast<unsigned long long>(sum));
}

float to_float(float x) { return x; }
float to_float(Bf16 x) { return __bfloat162float(x); }
float to_float(__half x) { return __half2float(x); }
template <class T>
T from_float(float x) {
  if constexpr (std::is_same_v<T, Bf16>) {
    return __float2bfloat16(x);
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half(x);
  } else {
    return static_cast<T>(x);
  }
}

// Whole numbers from -4 to 4: products and their sums are exact in every format.
template <class T>
void fill_whole(const Memory<T>& memory, unsigned seed) {
  std::mt19937 random(seed);
  for (size_t i = 0; i < memory.size(); ++i)
    memory[i] = from_float<T>(static_cast<float>(static_cast<int>(random() % 9) - 4));
}
template <class T>
void fill_normal(const Memory<T>& memory, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = from_float<T>(normal(random));
}
void fill_bits(const Memory<uint16_t>& memory) {
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<uint16_t>(i * 40503u + 11u);
}

// The beginning of dynamic shared memory, moved up to a multiple of 1024. Kernels ask for 1024 bytes more.
__device__ unsigned char* aligned_shared(unsigned char* shared) { return shared + (-smem_address(shared) & 1023); }

// ---- mma.sync ----

template <class T>
__device__ uint32_t pair_at(const T* two, int stride = 1) {
  uint16_t bits[2];
  memcpy(&bits[0], two, 2);
  memcpy(&bits[1], two + stride, 2);
  return bits[0] | static_cast<uint32_t>(bits[1]) << 16;
}

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

// Row-major c + a · b.
template <class T>
std::vector<double> product(const Memory<T>& a, const Memory<T>& b, const Memory<float>& c, int m, int n, int k) {
  std::vector<double> d(m * n);
  for (int row = 0; row < m; ++row) {
    for (int col = 0; col < n; ++col) {
      double sum = c[row * n + col];
      for (int i = 0; i < k; ++i) sum += double{to_float(a[row * k + i])} * double{to_float(b[i * n + col])};
      d[row * n + col] = sum;
    }
  }
  return d;
}

void expect_product(const Memory<float>& got, const std::vector<double>& expected, int n, double tolerance) {
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_LE(std::fabs(got[i] - expected[i]), tolerance)
        << "row " << i / n << ", column " << i % n << ": " << got[i] << " instead of " << expected[i];
  }
}

template <class T>
class Mma : public testing::Test {};
using HalfTypes = testing::Types<Bf16, __half>;
TYPED_TEST_SUITE(Mma, HalfTypes);

TYPED_TEST(Mma, MultipliesWholeNumbersExactly) {
  using T = TypeParam;
  const Memory<T> a(16 * 16), b(16 * 8);
  const Memory<float> c(16 * 8), d(16 * 8);
  fill_whole(a, 1), fill_whole(b, 2), fill_whole(c, 3);
  mma_kernel<T><<<1, 32>>>(a.get(), b.get(), c.get(), d.get());
  finish();
  expect_product(d, product(a, b, c, 16, 8, 16), 8, 0);
  print_checksum(d);
}

TYPED_TEST(Mma, AddsUpInFloat32) {
  using T = TypeParam;
  const Memory<T> a(16 * 16), b(16 * 8);
  const Memory<float> c(16 * 8), d(16 * 8);
  fill_normal(a, 1), fill_normal(b, 2), fill_normal(c, 3);
  mma_kernel<T><<<1, 32>>>(a.get(), b.get(), c.get(), d.get());
  finish();
  expect_product(d, product(a, b, c, 16, 8, 16), 8, 1e-5);
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

template <int N, bool kTransposed>
void test_matrices() {
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
TEST(Matrices, OneGoesThereAndBack) {
  KF_NEEDS(900);
  test_matrices<1, false>();
}
TEST(Matrices, TwoGoThereAndBack) {
  KF_NEEDS(900);
  test_matrices<2, false>();
}
TEST(Matrices, FourGoThereAndBack) {
  KF_NEEDS(900);
  test_matrices<4, false>();
}
TEST(Matrices, OneTransposedGoesThereAndBack) {
  KF_NEEDS(900);
  test_matrices<1, true>();
}
TEST(Matrices, TwoTransposedGoThereAndBack) {
  KF_NEEDS(900);
  test_matrices<2, true>();
}
TEST(Matrices, FourTransposedGoThereAndBack) {
  KF_NEEDS(900);
  test_matrices<4, true>();
}

// ---- cp.async ----

__global__ void cp_async_kernel(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(16) uint32_t tile[32 * 4 * 4];
  const int i = threadIdx.x;
  cp_async_16(tile + 4 * i, in + 4 * i);
  cp_async_commit();
  cp_async_16(tile + 128 + 4 * i, in + 128 + 4 * i, i % 17);  // 0 to 16 bytes
  cp_async_commit();
  cp_async_small<4>(tile + 256 + i, in + 256 + i);
  cp_async_small<8>(tile + 320 + 2 * i, in + 320 + 2 * i);
  cp_async_commit();
  cp_async_wait<2>();
  __syncthreads();
  for (int j = 0; j < 4; ++j) out[32 * j + i] = tile[32 * j + i];
  cp_async_wait<0>();
  __syncthreads();
  for (int j = 4; j < 16; ++j) out[32 * j + i] = j == 9 ? 0 : tile[32 * j + i];  // 288 to 319: nobody's
}

TEST(CpAsync, CopiesAllOrSomeOfSixteenBytes) {
  const Memory<uint32_t> in(512), out(512);
  for (int i = 0; i < 512; ++i) in[i] = 0x01010101u * static_cast<uint32_t>(i % 255 + 1);
  // The last two pieces lie at 384 and after; they are not copied.
  cp_async_kernel<<<1, 32>>>(in.get(), out.get());
  finish();
  for (int i = 0; i < 384; ++i) {
    uint32_t expected = in[i];
    if (i >= 128 && i < 256) {
      const int bytes = (i - 128) / 4 % 17 - 4 * (i % 4);  // of this word
      if (bytes <= 0) expected = 0;
      if (bytes > 0 && bytes < 4) expected &= (1u << 8 * bytes) - 1;
    }
    if (i >= 288 && i < 320) expected = 0;
    ASSERT_EQ(out[i], expected) << "word " << i;
  }
}

// ---- mbarrier ----

// Thread 0 hands numbers to the others through one word, 20 times: a barrier says that it is full, one that it is
// empty.
__global__ void phases_kernel(uint32_t* out) {
  __shared__ uint64_t full, empty;
  __shared__ uint32_t word;
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 1);
    mbarrier_init(&empty, blockDim.x - 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  for (uint32_t i = 0; i < 20; ++i) {
    if (threadIdx.x == 0) {
      mbarrier_wait(&empty, (i & 1) ^ 1);
      word = 100 + i;
      mbarrier_arrive(&full);
    } else {
      mbarrier_wait(&full, i & 1);
      out[i * (blockDim.x - 1) + threadIdx.x - 1] = word;
      mbarrier_arrive(&empty);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) mbarrier_invalidate(&full);
}

TEST(Mbarrier, GoesThroughPhases) {
  KF_NEEDS(900);
  const Memory<uint32_t> out(20 * 63);
  phases_kernel<<<1, 64>>>(out.get());
  finish();
  for (int i = 0; i < 20 * 63; ++i) ASSERT_EQ(out[i], 100u + i / 63) << "phase " << i / 63 << ", thread " << i % 63 + 1;
}

// Every thread copies 16 bytes; the barrier knows when all have come.
__global__ void copies_kernel(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(16) uint32_t tile[64 * 4];
  __shared__ uint64_t ready;
  const int i = threadIdx.x;
  if (i == 0) {
    mbarrier_init(&ready, blockDim.x);
    mbarrier_init_fence();
  }
  __syncthreads();
  cp_async_16(tile + 4 * i, in + 4 * i);
  mbarrier_arrive_after_copies(&ready);
  mbarrier_wait(&ready, 0);
  for (int j = 0; j < 4; ++j) out[64 * j + i] = tile[64 * j + i];
}

TEST(Mbarrier, WaitsForCopies) {
  KF_NEEDS(900);
  const Memory<uint32_t> in(256), out(256);
  for (int i = 0; i < 256; ++i) in[i] = 7u * i + 3;
  copies_kernel<<<1, 64>>>(in.get(), out.get());
  finish();
  for (int i = 0; i < 256; ++i) ASSERT_EQ(out[i], in[i]) << "word " << i;
}

// ---- bulk copies ----

__global__ void bulk_kernel(const uint32_t* in, uint32_t* out, uint32_t words) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto* const tile = reinterpret_cast<uint32_t*>(shared);
  __shared__ uint64_t ready;
  if (threadIdx.x == 0) {
    mbarrier_init(&ready, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(&ready, words * 4);
    bulk_load(tile, in, words * 2, &ready);
    bulk_load(tile + words / 2, in + words / 2, words * 2, &ready);
  }
  mbarrier_wait(&ready, 0);
  for (uint32_t i = threadIdx.x; i < words; i += blockDim.x) tile[i] += i;
  tma_store_fence();
  __syncthreads();
  if (threadIdx.x == 0) {
    bulk_store(out, tile, words * 4);
    tma_store_commit();
    tma_store_wait<0>();
  }
}

TEST(Bulk, CopiesThereAndBack) {
  KF_NEEDS(900);
  const Memory<uint32_t> in(1024), out(1024);
  for (int i = 0; i < 1024; ++i) in[i] = 2654435761u * i;
  bulk_kernel<<<1, 64, 4096>>>(in.get(), out.get(), 1024);
  finish();
  for (uint32_t i = 0; i < 1024; ++i) ASSERT_EQ(out[i], in[i] + i) << "word " << i;
  print_checksum(out);
}

// All blocks add `in` to what `out` holds; a block's number comes on top. The last one knows of the others by `count`.
__global__ void bulk_add_kernel(const float* in, float* out, float* seen, unsigned* count) {
  __shared__ __align__(16) float tile[256];
  for (uint32_t i = threadIdx.x; i < 256; i += blockDim.x) tile[i] = in[i] + static_cast<float>(blockIdx.x);
  tma_store_fence();
  __syncthreads();
  if (threadIdx.x != 0) return;
  bulk_add(out, tile, sizeof tile);
  tma_store_commit();
  tma_store_wait<0>();
  __threadfence();
  if (atomicAdd(count, 1u) != gridDim.x - 1) return;
  __threadfence();
  tma_global_fence();
  bulk_add(seen, tile, sizeof tile);
  for (int i = 0; i < 256; ++i) seen[256 + i] = __ldcg(out + i);
  tma_store_commit();
  tma_store_wait<0>();
}

TEST(Bulk, AddsToWhatIsThere) {
  KF_NEEDS(900);
  constexpr int kBlocks = 5;
  const Memory<float> in(256), out(256), seen(512);
  const Memory<unsigned> count(1);
  count[0] = 0;
  for (int i = 0; i < 256; ++i) in[i] = static_cast<float>(i), out[i] = 1000.0f, seen[i] = 0;
  bulk_add_kernel<<<kBlocks, 64>>>(in.get(), out.get(), seen.get(), count.get());
  finish();
  for (int i = 0; i < 256; ++i) {
    const float sum = 1000.0f + kBlocks * static_cast<float>(i) + 10;  // 0 + 1 + 2 + 3 + 4
    ASSERT_EQ(out[i], sum) << "float " << i;
    ASSERT_EQ(seen[256 + i], sum) << "float " << i << ", read by the last block";
  }
  print_checksum(out);
}

// ---- TMA ----

struct At {
  int32_t c[5];
};

// Loads a box as it lies in shared memory, with its swizzle, into `out`.
template <int kRank>
__global__ void load_kernel(const __grid_constant__ CUtensorMap map, At at, uint32_t* out, uint32_t bytes) {
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* const box = aligned_shared(shared);
  __shared__ uint64_t ready;
  if (threadIdx.x == 0) {
    tma_prefetch_map(&map);
    mbarrier_init(&ready, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(&ready, bytes);
    const int32_t* const c = at.c;
    if constexpr (kRank == 1) tma_load(box, &map, &ready, c[0]);
    if constexpr (kRank == 2) tma_load(box, &map, &ready, c[0], c[1]);
    if constexpr (kRank == 3) tma_load(box, &map, &ready, c[0], c[1], c[2]);
    if constexpr (kRank == 4) tma_load(box, &map, &ready, c[0], c[1], c[2], c[3]);
    if constexpr (kRank == 5) tma_load(box, &map, &ready, c[0], c[1], c[2], c[3], c[4]);
  }
  mbarrier_wait(&ready, 0);
  for (uint32_t i = threadIdx.x; i < bytes / 4; i += blockDim.x) out[i] = reinterpret_cast<const uint32_t*>(box)[i];
}

template <int kRank>
__global__ void store_kernel(const __grid_constant__ CUtensorMap map, At at, const uint32_t* in, uint32_t bytes,
                             bool add) {
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* const box = aligned_shared(shared);
  for (uint32_t i = threadIdx.x; i < bytes / 4; i += blockDim.x) reinterpret_cast<uint32_t*>(box)[i] = in[i];
  tma_store_fence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const int32_t* const c = at.c;
    if constexpr (kRank == 1) tma_store(&map, box, c[0]);
    if constexpr (kRank == 2) {
      if (add) {
        tma_add(&map, box, c[0], c[1]);
      } else {
        tma_store(&map, box, c[0], c[1]);
      }
    }
    if constexpr (kRank == 3) tma_store(&map, box, c[0], c[1], c[2]);
    if constexpr (kRank == 4) tma_store(&map, box, c[0], c[1], c[2], c[3]);
    if constexpr (kRank == 5) tma_store(&map, box, c[0], c[1], c[2], c[3], c[4]);
    tma_store_commit();
    tma_store_wait_read<0>();
  }
}

// Element (x, y, …) of the tensor that lies at `at` within the box, or -1 outside of the tensor.
template <size_t kRank>
int64_t element_of(const std::array<uint64_t, kRank>& size, const std::array<uint32_t, kRank>& box, const At& at,
                   int64_t index) {
  int64_t element = 0, step = 1;
  for (size_t d = 0; d < kRank; ++d) {
    const int64_t place = at.c[d] + index % box[d];
    index /= box[d];
    if (place < 0 || place >= static_cast<int64_t>(size[d])) return -1;
    element += place * step;
    step *= static_cast<int64_t>(size[d]);
  }
  return element;
}

// Boxes within a dense tensor of 16-bit elements and over each of its edges: loaded, and stored back elsewhere.
template <size_t kRank>
void test_boxes(const std::array<uint64_t, kRank>& size, const std::array<uint32_t, kRank>& box, Swizzle swizzle,
                const std::vector<At>& places) {
  uint64_t elements = 1;
  uint32_t in_box = 1;
  std::array<uint64_t, kRank - 1> stride{};
  for (size_t d = 0; d < kRank; ++d) {
    elements *= size[d];
    in_box *= box[d];
    if (d + 1 < kRank) stride[d] = elements * 2;
  }
  const Memory<uint16_t> tensor(elements);
  fill_bits(tensor);
  const CUtensorMap map = make_tensor_map(tensor.get(), size, stride, box, swizzle);
  const Memory<uint32_t> got((in_box * 2 + 3) / 4);
  const auto* const bits = reinterpret_cast<const uint16_t*>(got.get());
  constexpr int kR = static_cast<int>(kRank);
  const uint32_t shared = in_box * 2 + 1024;
  for (const At& at : places) {
    const std::string where = "box at " + std::to_string(at.c[0]) + ", " + std::to_string(at.c[1]) + ", " +
                              std::to_string(at.c[2]) + " with swizzle " + std::to_string(static_cast<int>(swizzle));
    load_kernel<kR><<<1, 64, shared>>>(map, at, got.get(), in_box * 2);
    finish();
    for (uint32_t i = 0; i < in_box; ++i) {
      const int64_t from = element_of(size, box, at, i);
      ASSERT_EQ(bits[swizzled_offset(2 * i, swizzle) / 2], from < 0 ? 0 : tensor[from]) << where << ", element " << i;
    }
    print_checksum(got);

    if (*std::min_element(at.c, at.c + kRank) < 0) continue;  // only a load may begin before the tensor
    const Memory<uint16_t> copy(elements);
    for (uint64_t i = 0; i < elements; ++i) copy[i] = 0xabcd;
    const CUtensorMap copy_map = make_tensor_map(copy.get(), size, stride, box, swizzle);
    store_kernel<kR><<<1, 64, shared>>>(copy_map, at, got.get(), in_box * 2, false);
    finish();
    std::vector<uint16_t> expected(elements, 0xabcd);
    for (uint32_t i = 0; i < in_box; ++i) {
      const int64_t to = element_of(size, box, at, i);
      if (to >= 0) expected[to] = tensor[to];
    }
    for (uint64_t i = 0; i < elements; ++i) ASSERT_EQ(copy[i], expected[i]) << "stored " << where << ", element " << i;
  }
}

TEST(Tma, CopiesRows) {
  KF_NEEDS(900);
  test_boxes<1>({1000}, {128}, Swizzle::kNone, {{{0}}, {{256}}, {{-24}}, {{936}}});
}
TEST(Tma, CopiesTilesWithoutASwizzle) {
  KF_NEEDS(900);
  test_boxes<2>({72, 40}, {24, 16}, Swizzle::kNone, {{{0, 0}}, {{8, 5}}, {{-8, -3}}, {{56, 33}}, {{80, 0}}});
}
TEST(Tma, CopiesTilesWithEachSwizzle) {
  KF_NEEDS(900);
  test_boxes<2>({72, 40}, {16, 24}, Swizzle::k32, {{{0, 0}}, {{8, 5}}, {{-8, -3}}, {{64, 33}}});
  test_boxes<2>({72, 40}, {32, 24}, Swizzle::k64, {{{0, 0}}, {{8, 5}}, {{-16, -3}}, {{64, 33}}});
  test_boxes<2>({72, 40}, {64, 24}, Swizzle::k128, {{{0, 0}}, {{8, 5}}, {{-8, -3}}, {{48, 33}}});
}
TEST(Tma, CopiesBoxesOfThreeToFiveDimensions) {
  KF_NEEDS(900);
  test_boxes<3>({24, 10, 6}, {16, 4, 3}, Swizzle::k32, {{{0, 0, 0}}, {{16, 7, 4}}, {{-8, -1, -1}}});
  test_boxes<4>({24, 6, 5, 4}, {8, 2, 3, 2}, Swizzle::kNone, {{{0, 0, 0, 0}}, {{16, 5, 3, 3}}, {{-8, -1, -1, -1}}});
  test_boxes<5>({16, 4, 3, 4, 3}, {8, 2, 2, 3, 2}, Swizzle::kNone,
                {{{0, 0, 0, 0, 0}}, {{8, 3, 2, 2, 2}}, {{-8, -1, -1, -1, -1}}});
}

TEST(Tma, FillsWithNanWhereAsked) {
  KF_NEEDS(900);
  const Memory<float> tensor(32 * 8);
  fill_whole(tensor, 5);
  const CUtensorMap map = make_tensor_map<float, 2>(tensor.get(), {32, 8}, {128}, {16, 8}, Swizzle::kNone, true);
  const Memory<uint32_t> got(16 * 8);
  load_kernel<2><<<1, 32, 2048>>>(map, At{{24, 4}}, got.get(), 512);
  finish();
  for (int i = 0; i < 128; ++i) {
    float value;
    std::memcpy(&value, &got[i], 4);
    const int x = 24 + i % 16, y = 4 + i / 16;
    if (x < 32 && y < 8) {
      ASSERT_EQ(value, tensor[y * 32 + x]) << "element " << i;
    } else {
      ASSERT_TRUE(std::isnan(value)) << "element " << i << " is " << value;
    }
  }
}

TEST(Tma, AddsToATensor) {
  KF_NEEDS(900);
  const Memory<float> tensor(32 * 8), box(16 * 8), before(32 * 8);
  fill_whole(tensor, 6), fill_whole(box, 7), fill_whole(before, 6);
  const CUtensorMap map = make_tensor_map<float, 2>(tensor.get(), {32, 8}, {128}, {16, 8}, Swizzle::kNone);
  for (int round = 0; round < 2; ++round) {
    store_kernel<2><<<1, 32, 2048>>>(map, At{{20, 3}}, reinterpret_cast<uint32_t*>(box.get()), 512, true);
    finish();
  }
  for (int i = 0; i < 256; ++i) {
    const int x = i % 32 - 20, y = i / 32 - 3;
    const float added = x >= 0 && x < 16 && y >= 0 ? 2 * box[y * 16 + x] : 0;
    ASSERT_EQ(tensor[i], before[i] + added) << "element " << i;
  }
  print_checksum(tensor);
}

TEST(Tma, RefusesMapsThatTheHardwareCannotHave) {
  KF_NEEDS(900);
  const Memory<float> tensor(1024);
  const float* const t = tensor.get();
  EXPECT_NO_THROW((make_tensor_map<float, 2>(t, {32, 32}, {128}, {32, 8}, Swizzle::k128)));
  EXPECT_THROW((make_tensor_map<float, 2>(t + 1, {28, 32}, {128}, {4, 8}, Swizzle::kNone)), std::runtime_error);
  EXPECT_THROW((make_tensor_map<float, 2>(t, {32, 32}, {132}, {4, 8}, Swizzle::kNone)), std::runtime_error);
  EXPECT_THROW((make_tensor_map<float, 2>(t, {32, 32}, {128}, {3, 8}, Swizzle::kNone)), std::runtime_error);
  EXPECT_THROW((make_tensor_map<float, 2>(t, {32, 32}, {128}, {4, 257}, Swizzle::kNone)), std::runtime_error);
  EXPECT_THROW((make_tensor_map<float, 2>(t, {32, 32}, {128}, {16, 8}, Swizzle::k32)), std::runtime_error);
  EXPECT_THROW((make_tensor_map<float, 2>(t, {0, 32}, {128}, {4, 8}, Swizzle::kNone)), std::runtime_error);
}

// ---- wgmma ----

// Where element (row, k) of an operand lies, in bytes; `row` is a row of A or a column of B. See matrix_descriptor.
struct Layout {
  Major major;
  Swizzle swizzle;
  uint32_t leading, stride;

  __host__ __device__ uint32_t offset(uint32_t row, uint32_t k) const {
    const uint32_t width = swizzle == Swizzle::kNone ? 16
                           : swizzle == Swizzle::k32 ? 32
                           : swizzle == Swizzle::k64 ? 64
                                                     : 128;
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
  const uint32_t width = swizzle == Swizzle::kNone ? 16
                         : swizzle == Swizzle::k32 ? 32
                         : swizzle == Swizzle::k64 ? 64
                                                   : 128;
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

template <int N>
void test_width() {
  test_wgmma<N, Bf16, Major::kK, Major::kK>();
  test_wgmma<N, Bf16, Major::kK, Major::kMN>();
}
TEST(Wgmma, Is8Wide) {
  KF_NEEDS(901);
  test_width<8>();
}
TEST(Wgmma, Is16Wide) {
  KF_NEEDS(901);
  test_width<16>();
}
TEST(Wgmma, Is32Wide) {
  KF_NEEDS(901);
  test_width<32>();
}
TEST(Wgmma, Is64Wide) {
  KF_NEEDS(901);
  test_width<64>();
}
TEST(Wgmma, Is96Wide) {
  KF_NEEDS(901);
  test_width<96>();
}
TEST(Wgmma, Is128Wide) {
  KF_NEEDS(901);
  test_width<128>();
}
TEST(Wgmma, Is192Wide) {
  KF_NEEDS(901);
  test_width<192>();
}
TEST(Wgmma, Is256Wide) {
  KF_NEEDS(901);
  test_width<256>();
}
TEST(Wgmma, TakesAInEitherMajor) {
  KF_NEEDS(901);
  test_wgmma<64, Bf16, Major::kMN, Major::kK>();
  test_wgmma<64, Bf16, Major::kMN, Major::kMN>();
}
TEST(Wgmma, TakesFloat16) {
  KF_NEEDS(901);
  test_wgmma<64, __half, Major::kK, Major::kK>();
  test_wgmma<128, __half, Major::kMN, Major::kMN>();
}
TEST(Wgmma, TakesAFromRegisters) {
  KF_NEEDS(901);
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

TEST(Pipeline, MultipliesMatrices) {
  KF_NEEDS(901);
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

// ---- clusters ----

template <class... Params, class... Args>
void launch_clusters(void (*kernel)(Params...), int cluster, int blocks, int shared, Args... args) {
  launch_in_clusters(kernel, cluster, blocks, 32, shared, nullptr, args...);
  finish();
}

// Each block adds up the numbers of all four, and gives its rank to the next one.
template <class T>
__global__ void cluster_kernel(const float* in, T* out) {
  __shared__ float mine[32];
  __shared__ T given[32];
  const uint32_t rank = cluster_rank_of_block(), blocks = cluster_blocks();
  mine[threadIdx.x] = in[blockIdx.x * 32 + threadIdx.x];
  cluster_sync();
  T sum = 0;
  for (uint32_t r = 0; r < blocks; ++r) sum += load_remote(remote_address(&mine[threadIdx.x], r));
  store_remote(remote_address(&given[threadIdx.x], (rank + 1) % blocks), sum + static_cast<T>(rank));
  cluster_sync();
  out[blockIdx.x * 32 + threadIdx.x] = given[threadIdx.x];
}

template <class T>
void check_reaching_into_other_blocks() {
  const Memory<float> in(8 * 32);
  const Memory<T> out(8 * 32);
  fill_whole(in, 10);
  launch_clusters(cluster_kernel<T>, 4, 8, 0, static_cast<const float*>(in.get()), out.get());
  for (int i = 0; i < 8 * 32; ++i) {
    const int first = i / 128 * 128, rank = i / 32 % 4;
    T expected = static_cast<T>((rank + 3) % 4);
    for (int r = 0; r < 4; ++r) expected += in[first + 32 * r + i % 32];
    ASSERT_EQ(out[i], expected) << "block " << i / 32 << ", thread " << i % 32;
  }
  print_checksum(out);
}

TEST(Cluster, ReachesIntoOtherBlocks) {
  KF_NEEDS(900);
  check_reaching_into_other_blocks<float>();
  check_reaching_into_other_blocks<double>();
}

// Every thread of the cluster arrives at the barrier of rank 0, which then sends two numbers to each of the others.
template <class C>
__global__ void remote_barrier_kernel(C* out) {
  __shared__ uint64_t arrived, sent;
  __shared__ Pair<C> numbers;
  if (threadIdx.x == 0) {
    mbarrier_init(&arrived, 64);
    mbarrier_init(&sent, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_tx(&sent, sizeof(numbers));
  }
  cluster_sync();
  mbarrier_arrive_remote(&arrived, 0);
  if (cluster_rank_of_block() == 0) {
    mbarrier_wait_cluster(&arrived, 0);
    if (threadIdx.x < 2) {
      const C number = 5 + static_cast<C>(threadIdx.x);
      store_remote_async(remote_address(&numbers, threadIdx.x), Pair<C>{number, number * 10},
                         remote_address(&sent, threadIdx.x));
    }
  }
  mbarrier_wait_cluster(&sent, 0);
  out[blockIdx.x * 32 + threadIdx.x] = threadIdx.x % 2 == 0 ? numbers.first : numbers.second;
  cluster_sync();
}

template <class C>
void check_barriers_of_other_blocks() {
  const Memory<C> out(64);
  launch_clusters(remote_barrier_kernel<C>, 2, 2, 0, out.get());
  for (int i = 0; i < 64; ++i) {
    ASSERT_EQ(out[i], (i < 32 ? 5 : 6) * (i % 2 == 0 ? 1 : 10)) << "block " << i / 32 << ", thread " << i % 32;
  }
}

TEST(Cluster, ArrivesAtTheBarriersOfOtherBlocks) {
  KF_NEEDS(900);
  check_barriers_of_other_blocks<float>();
  check_barriers_of_other_blocks<double>();
}

// Each block reads the other's numbers, 16 bytes at a time, and says so before the other overwrites them.
__global__ void leave_kernel(const float* in, float* out) {
  __shared__ __align__(16) float mine[128];
  __shared__ uint64_t left;
  const uint32_t other = 1 - cluster_rank_of_block();
  if (threadIdx.x == 0) {
    mbarrier_init(&left, 32);
    mbarrier_init_fence();
  }
  for (int i = 0; i < 4; ++i) mine[threadIdx.x * 4 + i] = in[blockIdx.x * 128 + threadIdx.x * 4 + i];
  cluster_sync();
  const float4 read = load_remote_4(remote_address(&mine[threadIdx.x * 4], other));
  mbarrier_arrive_remote_cta(&left, other);
  mbarrier_wait_cluster(&left, 0);
  for (int i = 0; i < 4; ++i) mine[threadIdx.x * 4 + i] = -1;
  const float values[4] = {read.x, read.y, read.z, read.w};
  for (int i = 0; i < 4; ++i) out[blockIdx.x * 128 + threadIdx.x * 4 + i] = values[i];
  cluster_sync();
}

TEST(Cluster, LeavesWhatItHasOnlyRead) {
  KF_NEEDS(900);
  const Memory<float> in(4 * 128), out(4 * 128);
  fill_whole(in, 100);
  launch_clusters(leave_kernel, 2, 4, 0, static_cast<const float*>(in.get()), out.get());
  for (int i = 0; i < 4 * 128; ++i) ASSERT_EQ(out[i], in[i ^ 128]) << "block " << i / 128 << ", number " << i % 128;
  print_checksum(out);
}

// Rank 0 loads one tile for all blocks.
__global__ void multicast_kernel(const __grid_constant__ CUtensorMap map, uint32_t* out) {
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* const tile = aligned_shared(shared);
  __shared__ uint64_t ready;
  if (threadIdx.x == 0) {
    mbarrier_init(&ready, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_tx(&ready, 64 * 8 * 2);
  }
  cluster_sync();
  if (threadIdx.x == 0 && cluster_rank_of_block() == 0) tma_load_multicast(tile, &map, &ready, 0b1101, 8, 2);
  if (cluster_rank_of_block() != 1) mbarrier_wait(&ready, 0);
  for (uint32_t i = threadIdx.x; i < 256; i += 32) {
    out[blockIdx.x * 256 + i] = cluster_rank_of_block() != 1 ? reinterpret_cast<const uint32_t*>(tile)[i] : 0;
  }
  cluster_sync();
}

TEST(Cluster, LoadsOneTileForSeveralBlocks) {
  KF_NEEDS(901);
  const Memory<uint16_t> tensor(128 * 16);
  fill_bits(tensor);
  const CUtensorMap map = make_tensor_map<uint16_t, 2>(tensor.get(), {128, 16}, {256}, {64, 8}, Swizzle::k128);
  const Memory<uint32_t> out(4 * 256);
  launch_clusters(multicast_kernel, 4, 4, 2048, map, out.get());
  for (uint32_t block = 0; block < 4; ++block) {
    const auto* const bits = reinterpret_cast<const uint16_t*>(out.get() + 256 * block);
    for (uint32_t i = 0; i < 512; ++i) {
      const uint16_t expected = block == 1 ? 0 : tensor[(2 + i / 64) * 128 + 8 + i % 64];
      ASSERT_EQ(bits[block == 1 ? i : swizzled_offset(2 * i, Swizzle::k128) / 2], expected)
          << "rank " << block << ", element " << i;
    }
  }
  print_checksum(out);
}

}  // namespace
}  // namespace kf::KF_BACKEND
