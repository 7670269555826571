// A softmax of 4096 rows of 1024 floats, 256 threads a row.
#include <gtest/gtest.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>

#include "memory.h"

namespace {

using test::Memory;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif
constexpr int kRows = kSanitized ? 128 : 4096, kWidth = 1024, kThreads = 256, kEach = kWidth / kThreads;

template <class Op>
__device__ float block_reduce(float value, float* parts, Op op) {
  for (int d = 16; d > 0; d /= 2) value = op(value, __shfl_xor_sync(0xffffffffu, value, d));
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  value = parts[0];
  for (int warp = 1; warp < kThreads / 32; ++warp) value = op(value, parts[warp]);
  __syncthreads();
  return value;
}

__global__ void softmax_with_shuffles(const float* in, float* out) {
  __shared__ float parts[kThreads / 32];
  float values[kEach];
  float top = -INFINITY;
  for (int i = 0; i < kEach; ++i) {
    values[i] = in[blockIdx.x * kWidth + i * kThreads + threadIdx.x];
    top = fmaxf(top, values[i]);
  }
  top = block_reduce(top, parts, [](float a, float b) { return fmaxf(a, b); });
  float sum = 0;
  for (float& value : values) sum += value = __expf(value - top);
  sum = block_reduce(sum, parts, [](float a, float b) { return a + b; });
  for (int i = 0; i < kEach; ++i) out[blockIdx.x * kWidth + i * kThreads + threadIdx.x] = values[i] / sum;
}

__global__ void softmax_a_thread_a_row(const float* in, float* out, int rows) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  float top = -INFINITY, sum = 0;
  for (int i = 0; i < kWidth; ++i) top = fmaxf(top, in[row * kWidth + i]);
  for (int i = 0; i < kWidth; ++i) sum += __expf(in[row * kWidth + i] - top);
  for (int i = 0; i < kWidth; ++i) out[row * kWidth + i] = __expf(in[row * kWidth + i] - top) / sum;
}

__global__ void touch(float* out) { out[blockIdx.x * blockDim.x + threadIdx.x] = 1.0f; }

double cpu_seconds() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

struct Seconds {
  double wall = 1e9, cpu = 1e9;  // the least of each
};

template <class Launch>
Seconds measure(Launch launch) {
  Seconds best;
  for (int i = 0; i < 5; ++i) {
    const double cpu = cpu_seconds();
    const auto begin = std::chrono::steady_clock::now();
    launch();
    best.wall = std::min(best.wall, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    best.cpu = std::min(best.cpu, cpu_seconds() - cpu);
  }
  return best;
}

TEST(Performance, Softmax) {
  Memory<float> in(std::size_t{kRows} * kWidth), out(in.size()), reference(in.size());
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i * 7919 % 1000) * 0.01f;
  softmax_a_thread_a_row<<<kRows / 128, 128>>>(in.get(), reference.get(), kRows);
  const auto report = [&](const char* what, const Seconds& seconds) {
    std::printf("softmax %d x %d, %-16s %.3f s, %.3f s of CPU time\n", kRows, kWidth, what, seconds.wall, seconds.cpu);
  };
  const Seconds shuffles = measure([&] { softmax_with_shuffles<<<kRows, kThreads>>>(in.get(), out.get()); });
  for (std::size_t i = 0; i < in.size(); i += 997) ASSERT_NEAR(out[i], reference[i], 1e-5f * reference[i]);
  report("shuffles:", shuffles);
  report("a thread a row:", measure([&] { softmax_a_thread_a_row<<<kRows / 128, 128>>>(in.get(), out.get(), kRows); }));
  const Seconds store = measure([&] { touch<<<kRows * 4, kThreads>>>(out.get()); });
  std::printf("a thread that only stores: %.1f ns of CPU time\n", store.cpu / (4.0 * kRows * kThreads) * 1e9);
}

}  // namespace
