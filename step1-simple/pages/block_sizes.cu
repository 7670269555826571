// Block sizes and occupancy: the same copy with other launches, timed.
//
//   nvcc -O3 pages/block_sizes.cu && ./a.out 268435456        with a GPU: a gigabyte read and a gigabyte written
//   kernel-fusion simt pages/block_sizes.cu                   without one; then the times mean nothing
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

#define CHECK(call)                                                                       \
  do {                                                                                    \
    const cudaError_t error = (call);                                                     \
    if (error != cudaSuccess) {                                                           \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error)); \
      std::exit(1);                                                                       \
    }                                                                                     \
  } while (0)

// kVectors loads of 16 bytes a thread, all under way before the first store. The shared memory is not used: it only
// takes room, so that fewer blocks fit on a multiprocessor.
template <int kVectors>
__global__ void copy(const float4* __restrict__ x, float4* __restrict__ y, long vectors) {
  extern __shared__ float room[];
  if (vectors < 0) room[threadIdx.x] = 0;
  const long first = static_cast<long>(blockIdx.x) * blockDim.x * kVectors + threadIdx.x;
  float4 v[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const long i = first + k * static_cast<long>(blockDim.x);
    if (i < vectors) v[k] = x[i];
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const long i = first + k * static_cast<long>(blockDim.x);
    if (i < vectors) y[i] = v[k];
  }
}

// One line of a table: what part of a multiprocessor's warps can be there, what that puts under way, and the time.
template <int kVectors>
void measure(const float4* x, float4* y, long vectors, int threads, int shared_bytes) {
  CHECK(cudaFuncSetAttribute(copy<kVectors>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  int blocks_at_once, most_threads;
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_at_once, copy<kVectors>, threads, shared_bytes));
  CHECK(cudaDeviceGetAttribute(&most_threads, cudaDevAttrMaxThreadsPerMultiProcessor, 0));
  const int resident = blocks_at_once * threads;

  const long per_block = static_cast<long>(threads) * kVectors;
  const int blocks = static_cast<int>((vectors + per_block - 1) / per_block);
  cudaEvent_t start, stop;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&stop));
  copy<kVectors><<<blocks, threads, shared_bytes>>>(x, y, vectors);  // warm-up
  CHECK(cudaGetLastError());
  const int launches = 10;
  CHECK(cudaEventRecord(start));
  for (int k = 0; k < launches; ++k) copy<kVectors><<<blocks, threads, shared_bytes>>>(x, y, vectors);
  CHECK(cudaEventRecord(stop));
  CHECK(cudaEventSynchronize(stop));
  float ms;
  CHECK(cudaEventElapsedTime(&ms, start, stop));
  ms /= launches;
  CHECK(cudaEventDestroy(start));
  CHECK(cudaEventDestroy(stop));
  std::printf("%7d %8d %11d KB %9d %% %12d KB %10.1f %8.0f\n", threads, kVectors, shared_bytes / 1024,
              100 * resident / most_threads, resident * kVectors * 16 / 1024, 1e3 * ms, 32.0 * vectors / (1e6 * ms));
}

int main(int argc, char** argv) {
  const long n = argc > 1 ? std::atol(argv[1]) : 100000;
  if (n < 4 || n > 2000000000) {
    std::fprintf(stderr, "the number of floats must be from 4 to 2000000000, got %s\n", argv[1]);
    return 1;
  }
  const long vectors = n / 4;
  float4 *x, *y;
  CHECK(cudaMalloc(&x, vectors * sizeof(float4)));
  CHECK(cudaMalloc(&y, vectors * sizeof(float4)));
  CHECK(cudaMemset(x, 0, vectors * sizeof(float4)));

  const char* head = "threads  vectors  shared memory  occupancy  bytes under way  time, us     GB/s\n";
  std::printf("the size of a block\n%s", head);
  for (const int threads : {32, 64, 128, 256, 512, 1024}) measure<1>(x, y, vectors, threads, 0);
  int most_shared;  // a block's, when it asks: 227 KB on an H200, 99 KB on many others
  CHECK(cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
  std::printf("\nfewer blocks at once, one vector a thread\n%s", head);
  for (const int kb : {0, 32, 48, 64, 100, 200}) {
    if (kb * 1024 <= most_shared) measure<1>(x, y, vectors, 256, kb * 1024);
  }
  std::printf("\nfewer blocks at once, four vectors a thread\n%s", head);
  for (const int kb : {0, 32, 48, 64, 100, 200}) {
    if (kb * 1024 <= most_shared) measure<4>(x, y, vectors, 256, kb * 1024);
  }

  CHECK(cudaFree(x));
  CHECK(cudaFree(y));
}
