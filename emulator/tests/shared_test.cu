// Shared memory: static, dynamic, templated; fresh for each block; its limits.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include "errors.h"
#include "memory.h"

namespace {

using test::expect_error;
using test::Memory;

struct __align__(8) Pair {
  float key;
  int index;
};

template <class T, int kRows>
__global__ void many_declarations(T* out) {
  __shared__ T a[kRows], b[kRows][2];
  __shared__ alignas(64) T aligned[3];
  __shared__ __align__(16) float4 vectors[2];
  __shared__ Pair pair;
  __shared__ float scalar;
  static __shared__ volatile int flag;
  __shared__ union {
    T as_t;
    unsigned char as_bytes[8];
  } both;
  const int i = threadIdx.x;
  a[i] = T(i);
  b[i][0] = T(2 * i);
  b[i][1] = T(3 * i);
  if (i == 0) {
    aligned[2] = T(5);
    vectors[1] = make_float4(1, 2, 3, 4);
    pair = Pair{6.0f, 7};
    scalar = 8.0f;
    flag = 9;
    both.as_t = T(10);
  }
  __syncthreads();
  const int j = kRows - 1 - i;
  const bool at =
      reinterpret_cast<std::uintptr_t>(aligned) % 64 == 0 && reinterpret_cast<std::uintptr_t>(vectors) % 16 == 0;
  out[i] =
      !at ? T(-1)
          : a[j] + b[j][0] + b[j][1] + aligned[2] + T(vectors[1].w) + T(pair.index) + T(scalar) + T(flag) + both.as_t;
}

TEST(Shared, TemplatesStructsScalarsAlignment) {
  Memory<float> out(16);
  many_declarations<float, 16><<<1, 16>>>(out.get());
  for (int i = 0; i < 16; ++i) EXPECT_EQ(out[i], 6.0f * (15 - i) + 5 + 4 + 7 + 8 + 9 + 10);
  Memory<double> doubles(4);
  many_declarations<double, 4><<<1, 4>>>(doubles.get());
  EXPECT_EQ(doubles[0], 6.0 * 3 + 43);
}

template <class T>
__global__ void reverse(T* data) {
  extern __shared__ __align__(16) unsigned char raw[];
  T* const buffer = reinterpret_cast<T*>(raw);
  buffer[threadIdx.x] = data[threadIdx.x];
  __syncthreads();
  data[threadIdx.x] = buffer[blockDim.x - 1 - threadIdx.x];
}

template <class T>
__global__ void reverse_typed(T* data) {
  extern __shared__ T typed[];
  typed[threadIdx.x] = data[threadIdx.x];
  __syncthreads();
  data[threadIdx.x] = typed[blockDim.x - 1 - threadIdx.x];
}

TEST(Shared, Dynamic) {
  Memory<float> floats(100);
  Memory<double> doubles(100);
  for (int i = 0; i < 100; ++i) floats[i] = doubles[i] = i;
  reverse<<<1, 100, 100 * sizeof(float)>>>(floats.get());
  reverse<<<1, 100, 100 * sizeof(double)>>>(doubles.get());
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(floats[i] == 99 - i && doubles[i] == 99 - i);
  reverse_typed<<<1, 100, 100 * sizeof(float)>>>(floats.get());
  reverse_typed<<<1, 100, 100 * sizeof(double)>>>(doubles.get());
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(floats[i] == i && doubles[i] == i);
}

extern __shared__ float at_namespace_scope[];

__global__ void use_namespace_scope(float* out) {
  at_namespace_scope[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[blockIdx.x * blockDim.x + threadIdx.x] = at_namespace_scope[threadIdx.x ^ 1] + blockIdx.x;
}

TEST(Shared, DynamicDeclaredOutside) {
  Memory<float> out(64 * 8);
  use_namespace_scope<<<8, 64, 64 * sizeof(float)>>>(out.get());
  for (int i = 0; i < 64 * 8; ++i) ASSERT_EQ(out[i], float(i % 64 ^ 1) + i / 64);
}

__global__ void read_before_write(float* out) {
  __shared__ float a[32];
  extern __shared__ float d[];
  const bool fresh = std::isnan(a[threadIdx.x]) && std::isnan(d[threadIdx.x]);
  a[threadIdx.x] = d[threadIdx.x] = 1.0f;
  out[blockIdx.x * 32 + threadIdx.x] = fresh ? 1.0f : 0.0f;
}

TEST(Shared, IsPoisonedForEachBlock) {
  Memory<float> out(32 * 50);
  read_before_write<<<50, 32, 128>>>(out.get());
  for (float x : out) ASSERT_EQ(x, 1.0f);
}

__global__ void needs_dynamic(int* out, int n) {
  extern __shared__ int buffer[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) buffer[i] = i;
  __syncthreads();
  if (threadIdx.x == 0) *out = buffer[n - 1];
}

TEST(Shared, LimitsAsCudaHasThem) {
  Memory<int> out(1, -1);
  const int limit = 227 * 1024;
  needs_dynamic<<<1, 32, 48 * 1024>>>(out.get(), 12 * 1024);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(out[0], 12 * 1024 - 1);
  out[0] = -1;
  needs_dynamic<<<1, 32, 48 * 1024 + 4>>>(out.get(), 1);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  EXPECT_EQ(out[0], -1);
  EXPECT_EQ(cudaFuncSetAttribute(needs_dynamic, cudaFuncAttributeMaxDynamicSharedMemorySize, limit + 1),
            cudaErrorInvalidValue);
  cudaGetLastError();
  ASSERT_EQ(cudaFuncSetAttribute((const void*)needs_dynamic, cudaFuncAttributeMaxDynamicSharedMemorySize, limit),
            cudaSuccess);
  needs_dynamic<<<1, 32, limit>>>(out.get(), limit / 4);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(out[0], limit / 4 - 1);
  needs_dynamic<<<1, 32, limit + 4>>>(out.get(), 1);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

__global__ void static_and_dynamic(int* out) {
  __shared__ int fixed[1024];
  extern __shared__ int dynamic[];
  fixed[threadIdx.x] = dynamic[threadIdx.x] = 1;
  atomicExch(out, fixed[threadIdx.x] + dynamic[threadIdx.x]);
}

TEST(Shared, StaticCountsToo) {
  Memory<int> out(1);
  static_and_dynamic<<<1, 32, 1024>>>(out.get());
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  const int limit = 227 * 1024;
  EXPECT_EQ(cudaFuncSetAttribute(static_and_dynamic, cudaFuncAttributeMaxDynamicSharedMemorySize, limit),
            cudaErrorInvalidValue);
  cudaGetLastError();
  cudaFuncAttributes attributes;
  ASSERT_EQ(cudaFuncGetAttributes(&attributes, static_and_dynamic), cudaSuccess);
  EXPECT_EQ(attributes.sharedSizeBytes, 4096u);
  ASSERT_EQ(cudaFuncSetAttribute(static_and_dynamic, cudaFuncAttributeMaxDynamicSharedMemorySize, limit - 4096),
            cudaSuccess);
  static_and_dynamic<<<1, 32, limit - 4096>>>(out.get());
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

__global__ void too_much_static() {
  __shared__ char big[48 * 1024 + 1];
  big[threadIdx.x] = 0;
}

TEST(Shared, TooMuchStatic) {
  expect_error([] { too_much_static<<<1, 1>>>(); }, {"`big`"});
}

// AddressSanitizer ends the program at the first of these.
#ifndef __SANITIZE_ADDRESS__
__global__ void write_past_static() {
  __shared__ int first[4];
  __shared__ int second[4];
  first[threadIdx.x] = second[threadIdx.x] = 0;
  first[threadIdx.x + 1] = 1;
}

__global__ void write_past_dynamic() {
  extern __shared__ int all[];
  all[threadIdx.x] = 1;
}

TEST(Shared, WritesOutsideAreFoundAtTheEndOfTheBlock) {
  expect_error([] { write_past_static<<<1, 4>>>(); },
               {"write_past_static", "past the end of `first`", "shared_test.cu:"});
  write_past_dynamic<<<1, 4, 16>>>();
  EXPECT_THROW((write_past_dynamic<<<1, 5, 16>>>()), kf::simt::Error);
}
#endif

}  // namespace
