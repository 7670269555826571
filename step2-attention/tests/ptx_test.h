// What the tests of the wrappers of PTX have in common. Each wrapper is held against a plain loop: emulated on the CPU,
// or on a GPU of compute capability 9.0 (compiled for 90a). With KF_PTX_CHECKSUMS=1 each test prints a checksum of what
// it computed exactly, so that two machines can be compared bit for bit.
#pragma once

#include <gtest/gtest.h>
#include <kf/launch.h>
#include <step2/mbarrier.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

namespace kf::KF_BACKEND {

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

inline void finish() {
  check_launch();
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

// What the kernels were compiled for: 900 stands for compute capability 9.0, 901 for that with what only 9.0 itself
// has.
template <class Int>
__global__ void compiled_for_kernel(Int* architecture) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  *architecture = 901;
#else
  *architecture = __CUDA_ARCH__;
#endif
}
inline int compiled_for() {
  static const int architecture = [] {
    const Memory<int> answer(1);
    compiled_for_kernel<<<1, 1>>>(answer.get());
    finish();
    return answer[0];
  }();
  return architecture;
}

// Tests of what `kArchitecture` has.
template <int kArchitecture>
class On : public testing::Test {
  void SetUp() override {
    if (compiled_for() >= kArchitecture) return;
    GTEST_SKIP() << "compiled for " << compiled_for() << "; on a GPU of compute capability 9.0 configure with "
                 << "-D KF_CUDA_ARCHITECTURES=90a";
  }
};

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

inline float to_float(float x) { return x; }
inline float to_float(Bf16 x) { return __bfloat162float(x); }
inline float to_float(__half x) { return __half2float(x); }
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
inline void fill_bits(const Memory<uint16_t>& memory) {
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<uint16_t>(i * 40503u + 11u);
}

// The beginning of dynamic shared memory, moved up to a multiple of 1024. Kernels ask for 1024 bytes more.
__device__ inline unsigned char* aligned_shared(unsigned char* shared) {
  return shared + (-smem_address(shared) & 1023);
}

// Two halves in a register: that at `two`, and that `stride` elements behind it.
template <class T>
__device__ uint32_t pair_at(const T* two, int stride = 1) {
  uint16_t bits[2];
  memcpy(&bits[0], two, 2);
  memcpy(&bits[1], two + stride, 2);
  return bits[0] | static_cast<uint32_t>(bits[1]) << 16;
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

inline void expect_product(const Memory<float>& got, const std::vector<double>& expected, int n, double tolerance) {
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_LE(std::fabs(got[i] - expected[i]), tolerance)
        << "row " << i / n << ", column " << i % n << ": " << got[i] << " instead of " << expected[i];
  }
}

}  // namespace kf::KF_BACKEND
