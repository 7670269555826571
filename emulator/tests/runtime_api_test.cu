// Memory, streams, events, devices.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

namespace {

__global__ void fill(float* data, float value, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) data[i] = value;
}

TEST(Memory, FreshIsAlignedAndNan) {
  for (const std::size_t bytes : {4, 100, 4096, 1000000}) {
    float* data = nullptr;
    ASSERT_EQ(cudaMalloc(&data, bytes), cudaSuccess);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(data) % 256, 0u);
    for (std::size_t i = 0; i < bytes / 4; ++i) ASSERT_TRUE(std::isnan(data[i]));
    EXPECT_EQ(cudaFree(data), cudaSuccess);
  }
}

TEST(Memory, Errors) {
  EXPECT_EQ(cudaFree(nullptr), cudaSuccess);
  int local = 0;
  EXPECT_EQ(cudaFree(&local), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  void* huge = nullptr;
  EXPECT_EQ(cudaMalloc(&huge, std::size_t{1} << 50), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  float* data = nullptr;
  ASSERT_EQ(cudaMalloc(&data, 16), cudaSuccess);
  float host[8] = {};
  EXPECT_EQ(cudaMemcpy(data, host, 20, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset(data + 2, 0, 12), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(data, host, 16, static_cast<cudaMemcpyKind>(9)), cudaErrorInvalidMemcpyDirection);
  EXPECT_EQ(cudaFree(data), cudaSuccess);
  EXPECT_EQ(cudaFree(data), cudaErrorInvalidValue);
  cudaGetLastError();
}

TEST(Memory, CopiesAndFills) {
  constexpr int n = 1000;
  float *device = nullptr, *pinned = nullptr;
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  ASSERT_EQ(cudaMallocAsync(&device, n * sizeof(float), stream), cudaSuccess);
  ASSERT_EQ(cudaMallocHost(&pinned, n * sizeof(float)), cudaSuccess);
  fill<<<8, 128, 0, stream>>>(device, 2.5f, n);
  ASSERT_EQ(cudaMemcpyAsync(pinned, device, n * sizeof(float), cudaMemcpyDeviceToHost, stream), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  for (int i = 0; i < n; ++i) ASSERT_EQ(pinned[i], 2.5f);
  ASSERT_EQ(cudaMemsetAsync(device, 0, n * sizeof(float), stream), cudaSuccess);
  std::vector<float> host(n, 1.0f);
  ASSERT_EQ(cudaMemcpy(host.data(), device, n * sizeof(float), cudaMemcpyDeviceToHost), cudaSuccess);
  for (float x : host) ASSERT_EQ(x, 0.0f);
  float grid[3][4] = {{1, 2, 3, 4}, {5, 6, 7, 8}, {9, 10, 11, 12}};
  ASSERT_EQ(cudaMemcpy2D(device, 8, grid, 16, 8, 3, cudaMemcpyHostToDevice), cudaSuccess);
  const float expected[] = {1, 2, 5, 6, 9, 10};
  for (int i = 0; i < 6; ++i) EXPECT_EQ(device[i], expected[i]);
  EXPECT_EQ(cudaFreeHost(pinned), cudaSuccess);
  EXPECT_EQ(cudaFreeAsync(device, stream), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  std::size_t available = 0, total = 0;
  EXPECT_EQ(cudaMemGetInfo(&available, &total), cudaSuccess);
  EXPECT_LT(available, total);
}

TEST(Event, MeasuresTime) {
  cudaEvent_t begin, end;
  ASSERT_EQ(cudaEventCreate(&begin), cudaSuccess);
  ASSERT_EQ(cudaEventCreate(&end), cudaSuccess);
  float milliseconds = -1;
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaErrorInvalidResourceHandle);
  cudaGetLastError();
  cudaEventRecord(begin);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  cudaEventRecord(end);
  cudaEventSynchronize(end);
  ASSERT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaSuccess);
  EXPECT_GE(milliseconds, 19.9f);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
}

TEST(Device, Properties) {
  int count = 0, device = -1;
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  EXPECT_EQ(count, 1);
  EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
  EXPECT_EQ(device, 0);
  EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT_EQ(cudaSetDevice(1), cudaErrorInvalidDevice);
  cudaGetLastError();
  cudaDeviceProp properties;
  ASSERT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
  EXPECT_EQ(properties.warpSize, 32);
  EXPECT_EQ(properties.maxThreadsPerBlock, 1024);
  EXPECT_EQ(properties.sharedMemPerBlockOptin, 227u * 1024);
  int value = 0;
  EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0), cudaSuccess);
  EXPECT_EQ(value, properties.multiProcessorCount);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST(Occupancy, ByThreadsAndSharedMemory) {
  int blocks = 0;
  EXPECT_EQ(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, fill, 256, 0), cudaSuccess);
  EXPECT_EQ(blocks, 8);
  EXPECT_EQ(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, fill, 32, 47 * 1024), cudaSuccess);
  EXPECT_EQ(blocks, 4);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = 8;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.blockDim = 32;
  config.dynamicSmemBytes = 47 * 1024;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0, multiprocessors = 0;
  EXPECT_EQ(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0), cudaSuccess);
  EXPECT_EQ(cudaOccupancyMaxActiveClusters(&clusters, fill, &config), cudaSuccess);
  EXPECT_EQ(clusters, 4 * multiprocessors / 8);
  int grid = 0, block = 0;
  EXPECT_EQ(cudaOccupancyMaxPotentialBlockSize(&grid, &block, fill, 0, 0), cudaSuccess);
  EXPECT_EQ(block, 1024);
  EXPECT_GT(grid, 0);
}

TEST(LaunchKernel, ByArrayOfArguments) {
  float* data = nullptr;
  cudaMalloc(&data, 64 * sizeof(float));
  float value = 4.0f;
  int n = 64;
  void* arguments[] = {&data, &value, &n};
  EXPECT_EQ(cudaLaunchKernel(reinterpret_cast<const void*>(fill), dim3(2), dim3(32), arguments, 0, nullptr),
            cudaSuccess);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(data[i], 4.0f);
  cudaLaunchConfig_t config;
  config.gridDim = 2;
  config.blockDim = 32;
  EXPECT_EQ(cudaLaunchKernelEx(&config, fill, data, 5.0f, 64), cudaSuccess);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(data[i], 5.0f);
  cudaFree(data);
}

__global__ void say() { printf("block %d thread %d\n", blockIdx.x, threadIdx.x); }

TEST(Printf, FromAKernel) {
  testing::internal::CaptureStdout();
  say<<<2, 2>>>();
  std::fflush(stdout);
  const std::string text = testing::internal::GetCapturedStdout();
  for (const char* line : {"block 0 thread 0\n", "block 0 thread 1\n", "block 1 thread 0\n", "block 1 thread 1\n"}) {
    EXPECT_NE(text.find(line), std::string::npos) << text;
  }
}

}  // namespace
