// Indices, and launches of every form.
#include <gtest/gtest.h>
#include <kf_simt.h>

#include "memory.h"

namespace {

using test::Memory;

__global__ void write_indices(int* out) {
  const dim3 g = gridDim, b = blockDim;
  const int block = blockIdx.x + g.x * (blockIdx.y + g.y * blockIdx.z);
  const int thread = threadIdx.x + b.x * (threadIdx.y + b.y * threadIdx.z);
  const int at = block * (b.x * b.y * b.z) + thread;
  out[at] =
      ((((blockIdx.x * 10 + blockIdx.y) * 10 + blockIdx.z) * 10 + threadIdx.x) * 10 + threadIdx.y) * 10 + threadIdx.z;
}

TEST(Index, ThreeDimensions) {
  const dim3 grid(3, 4, 5), block(5, 3, 2);
  Memory<int> out(3 * 4 * 5 * 5 * 3 * 2, -1);
  write_indices<<<grid, block>>>(out.get());
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  int at = 0;
  for (int bz = 0; bz < 5; ++bz)
    for (int by = 0; by < 4; ++by)
      for (int bx = 0; bx < 3; ++bx)
        for (int tz = 0; tz < 2; ++tz)
          for (int ty = 0; ty < 3; ++ty)
            for (int tx = 0; tx < 5; ++tx)
              ASSERT_EQ(out[at++], ((((bx * 10 + by) * 10 + bz) * 10 + tx) * 10 + ty) * 10 + tz);
}

__global__ void count_threads(unsigned long long* count) { atomicAdd(count, 1ULL); }

TEST(Index, LargestBlockAndManyBlocks) {
  Memory<unsigned long long> count(1);
  count_threads<<<3, 1024>>>(count.get());
  EXPECT_EQ(count[0], 3u * 1024);
  count[0] = 0;
  count_threads<<<dim3(70000, 2), 1>>>(count.get());
  EXPECT_EQ(count[0], 140000u);
}

template <class T, int kFactor = 2>
__global__ void scale(T* data, T by, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) data[i] *= by * kFactor;
}

__global__ void overloaded(int* out) { atomicExch(out, 1); }
__global__ void overloaded(float* out) { atomicExch(out, 2.0f); }
__global__ void overloaded(int* out, int value) { atomicExch(out, value); }

__global__ void accepts_null(const float* maybe, int* out) { *out = maybe == nullptr; }

template <class... Ts>
__global__ void sum_all(int* out, Ts... values) {
  *out = (0 + ... + static_cast<int>(values));
}

template <class T>
void launch_from_template(T* data, int n) {
  scale<T, 3><<<(n + 31) / 32, 32>>>(data, T{1}, n);
  auto generic = [&](auto factor) {
    scale<T><<<dim3((n + 31) / 32), dim3(32), 0, nullptr>>>(data, static_cast<T>(factor), n);
  };
  generic(5);
}

namespace inner {
template <class T, class U>
struct Pair {
  T first;
  U second;
};
__global__ void take_pair(Pair<int, float> pair, float* out) { *out = pair.first + pair.second; }
template <class P>
__global__ void take_any(P pair, float* out) {
  *out = pair.first * 10 + pair.second;
}
}  // namespace inner

struct Static {
  static __global__ void member(int* out) { *out = 42; }
  static const int kValue = 7;  // no definition: the launch must not take its address
};

TEST(Launch, DeducedTemplatesOverloadsNull) {
  Memory<float> data(100, 1.0f);
  scale<<<4, 32>>>(data.get(), 3.0f, 100);
  EXPECT_EQ(data[99], 6.0f);
  scale<float, 5><<<4, 32>>>(data.get(), 1.0f, 100);
  EXPECT_EQ(data[0], 30.0f);
  Memory<double> doubles(10, 1.0);
  launch_from_template(doubles.get(), 10);
  EXPECT_EQ(doubles[9], 30.0);

  Memory<int> one(1);
  overloaded<<<1, 1>>>(one.get());
  EXPECT_EQ(one[0], 1);
  overloaded<<<1, 1>>>(data.get());
  EXPECT_EQ(data[0], 2.0f);
  overloaded<<<1, 1>>>(one.get(), Static::kValue);
  EXPECT_EQ(one[0], 7);
  accepts_null<<<1, 1>>>(nullptr, one.get());
  EXPECT_EQ(one[0], 1);
  sum_all<<<1, 1>>>(one.get(), 1, 2L, short{3}, 4u);
  EXPECT_EQ(one[0], 10);

  inner::take_pair<<<1, 1>>>(inner::Pair<int, float>{1, 0.5f}, data.get());
  EXPECT_EQ(data[0], 1.5f);
  ::inner::take_any<inner::Pair<int, float>><<<1, 1>>>(inner::Pair<int, float>{1, 0.5f}, data.get());
  EXPECT_EQ(data[0], 10.5f);
  Static::member<<<1, 1>>>(one.get());
  EXPECT_EQ(one[0], 42);

  void (*pointer)(int*) = overloaded;
  pointer<<<1, 1>>>(one.get());
  EXPECT_EQ(one[0], 1);
  void (*table[])(int*) = {overloaded, Static::member};
  table[1]<<<1, 1>>>(one.get());
  EXPECT_EQ(one[0], 42);
  (*pointer)<<<1, 1>>>(one.get());
  EXPECT_EQ(one[0], 1);
}

__global__ void takes_numbers_and_pointers(int* out, const int* none, int zero, float real, unsigned long large) {
  *out = (none == nullptr) + (zero == 0) + (real == 0) + (large == 0);
}
template <class T>
__global__ void takes_any(T* out, T value) {
  *out = value == 0;
}
template <class T>
__global__ void takes_pointers(T* out, T* none, const char* text = nullptr) {
  *out = none == nullptr && text == nullptr;
}
__global__ void chosen(int* out, int) { *out = 1; }
__global__ void chosen(int* out, const char* none) { *out = 2 + (none == nullptr); }

TEST(Launch, ZerosAreNumbersOrNullPointers) {
  Memory<int> out(1);
  takes_numbers_and_pointers<<<1, 1>>>(out.get(), 0, 0, 0, 0);
  EXPECT_EQ(out[0], 4);
  takes_numbers_and_pointers<<<1, 1>>>(out.get(), 0L, 0, 0.0f, 0u);
  EXPECT_EQ(out[0], 4);
  takes_any<<<1, 1>>>(out.get(), 0);
  EXPECT_EQ(out[0], 1);
  takes_pointers<int><<<1, 1>>>(out.get(), 0, 0);
  EXPECT_EQ(out[0], 1);
  takes_pointers<int><<<1, 1>>>(out.get(), NULL, 0);
  EXPECT_EQ(out[0], 1);
  chosen<<<1, 1>>>(out.get(), 0);
  EXPECT_EQ(out[0], 1);
  chosen<<<1, 1>>>(out.get(), nullptr);
  EXPECT_EQ(out[0], 3);
}

TEST(Launch, ArgumentsAreEvaluatedOnce) {
  Memory<int> out(1);
  int calls = 0;
  const auto value = [&] { return ++calls; };
  overloaded<<<8, 64>>>(out.get(), value());
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(out[0], 1);
}

TEST(Launch, IsCounted) {
  const auto before = kf::simt::launch_count();
  Memory<int> out(1);
  overloaded<<<1, 1>>>(out.get());
  overloaded<<<2, 2>>>(out.get());
  overloaded<<<1, 2000>>>(out.get());  // refused
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  EXPECT_EQ(kf::simt::launch_count(), before + 2);
}

__constant__ float coefficients[4];
__device__ int device_counter = 5;
__managed__ int managed_value = 1;

__global__ void use_symbols(float* out) {
  *out = coefficients[0] + coefficients[3];
  atomicAdd(&device_counter, 2);
  managed_value = 9;
}

TEST(Launch, Symbols) {
  const float host[] = {1, 2, 3, 4};
  ASSERT_EQ(cudaMemcpyToSymbol(coefficients, host, sizeof(host)), cudaSuccess);
  Memory<float> out(1);
  use_symbols<<<1, 1>>>(out.get());
  EXPECT_EQ(out[0], 5.0f);
  int counter = 0;
  ASSERT_EQ(cudaMemcpyFromSymbol(&counter, device_counter, sizeof(counter)), cudaSuccess);
  EXPECT_EQ(counter, 7);
  EXPECT_EQ(managed_value, 9);
  EXPECT_EQ(cudaMemcpyToSymbol(coefficients, host, 20), cudaErrorInvalidValue);
  cudaGetLastError();
}

}  // namespace
