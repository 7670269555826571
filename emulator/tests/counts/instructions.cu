// Instructions of PTX that move memory: what the emulation does for them counts as theirs. And what lanes exchange.
#include <cuda_runtime.h>

#include <cstdio>

constexpr int kThreads = 64;  // two warps, one block

__device__ unsigned in_shared(const void* at) { return static_cast<unsigned>(__cvta_generic_to_shared(at)); }

__global__ void copy_async(const float4* in, float4* out) {
  __shared__ float4 tile[kThreads];
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(in_shared(&tile[threadIdx.x])), "l"(in + threadIdx.x));
  asm volatile("cp.async.commit_group;");
  asm volatile("cp.async.wait_group 0;");
  __syncthreads();
  out[threadIdx.x] = tile[kThreads - 1 - threadIdx.x];
}

__global__ void load_matrix(unsigned* out) {
  __shared__ alignas(16) unsigned short rows[2][32][8];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = 0; i < 8; ++i) rows[warp][lane][i] = static_cast<unsigned short>(i);
  __syncwarp();
  unsigned a, b, c, d;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(in_shared(rows[warp][lane])));
  out[threadIdx.x] = a + b + c + d;
}

__global__ void exchange(int* out) {
  int x = static_cast<int>(threadIdx.x);
  for (int away = 16; away > 0; away /= 2) x += __shfl_xor_sync(0xffffffffu, x, away);
  if (threadIdx.x < 32) x = __reduce_max_sync(0xffffffffu, x);
  if (threadIdx.x % 32 < 16) x += __shfl_down_sync(0x0000ffffu, x, 8);
  asm volatile("redux.sync.add.s32 %0, %0, 0xffffffff;" : "+r"(x));
  out[threadIdx.x] = x + __any_sync(0xffffffffu, x > 0);  // a vote is no shuffle
}

int main() {
  void *in, *out;
  if (cudaMalloc(&in, 4096) != cudaSuccess || cudaMalloc(&out, 4096) != cudaSuccess) return 1;
  cudaMemset(in, 0, 4096);
  copy_async<<<1, kThreads>>>(static_cast<const float4*>(in), static_cast<float4*>(out));
  load_matrix<<<1, kThreads>>>(static_cast<unsigned*>(out));
  exchange<<<1, kThreads>>>(static_cast<int*>(out));
  std::printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
  return 0;
}
