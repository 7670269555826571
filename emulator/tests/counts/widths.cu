// What one line of C++ becomes in instructions: widths, structures, what is no access at all, and lanes that part.
#include <cuda_runtime.h>

#include <cstdio>

constexpr int kThreads = 64;  // two warps, one block

struct Aligned {
  alignas(16) float element[4];
};
struct Loose {  // aligned to 4 bytes: no instruction may load 16
  float x, y, z, w;
};
struct alignas(16) Wide {
  double element[4];
};
struct Arguments {
  const float* in;
  float* out;
  int stride, count;
};

__constant__ float factors[4] = {1, 2, 3, 4};
__device__ float offset = 1;

__global__ void one_piece(const Aligned* in, Aligned* out) {
  Aligned v = in[threadIdx.x];
  for (float& e : v.element) e *= 2;
  out[threadIdx.x] = v;
}

__global__ void by_cast(const float* in, float* out) {
  Aligned v;
  *reinterpret_cast<int4*>(&v) = __ldcs(reinterpret_cast<const int4*>(in) + threadIdx.x);
  __stcs(reinterpret_cast<int4*>(out) + threadIdx.x, *reinterpret_cast<int4*>(&v));
}

__global__ void two_pieces(const Wide* in, Wide* out) {
  Wide v = in[threadIdx.x];
  v.element[3] += 1;
  out[threadIdx.x] = v;
}

__global__ void four_pieces(const Loose* in, float* out) {
  const Loose v = in[threadIdx.x];
  out[threadIdx.x] = v.x + v.y * v.z - v.w;
}

__global__ void three_pieces(const float3* in, float* out) {
  const float3 v = in[threadIdx.x];
  out[threadIdx.x] = v.x + v.y + v.z;
}

__global__ void bytes(const uchar3* in, uchar3* out) { out[threadIdx.x] = in[threadIdx.x]; }

// A value that is still in a register is not loaded again.
__global__ void loaded_once(const float* __restrict__ in, float* __restrict__ out) {
  const float a = in[threadIdx.x];
  out[threadIdx.x] = a + 1;
  out[threadIdx.x + kThreads] = in[threadIdx.x] * in[threadIdx.x];
}

// Arguments, constant memory, local arrays and indices are no global accesses.
__global__ void only_stores(Arguments a) {
  float local[8];
  for (int i = 0; i < 8; ++i) local[(i * a.stride) % 8] = factors[i % 4];
  a.out[threadIdx.x] = local[threadIdx.x % 8];
}

__global__ void device_variable(float* out) { out[threadIdx.x] = offset; }

// 8 and 16 bytes of shared memory: half of a warp, a quarter of it at a time.
__global__ void wide_shared(float* out) {
  __shared__ float2 two[kThreads];
  __shared__ float4 four[kThreads];
  two[threadIdx.x] = make_float2(threadIdx.x, 2);
  four[threadIdx.x] = make_float4(threadIdx.x, 2, 3, 4);
  __syncthreads();
  const float2 a = two[kThreads - 1 - threadIdx.x];
  const float4 b = four[4 * threadIdx.x % kThreads];
  out[threadIdx.x] = a.x + a.y + b.x + b.y + b.z + b.w;
}

__device__ __noinline__ float load(const float* from) { return *from; }

// Lanes 0 to 15 make a load that the others do not; the loads after it must still be matched.
__global__ void some_lanes(const float* in, float* out) {
  float sum = 0;
  if (threadIdx.x % 32 < 16) sum = load(in + threadIdx.x);
  __syncwarp();
  sum += load(in + threadIdx.x);
  sum += load(in + threadIdx.x + kThreads);
  out[threadIdx.x] = sum;
}

// Far more requests than are kept waiting.
__global__ void many(Arguments a) {
  float sum = 0;
  for (int i = 0; i < a.count; ++i) sum += a.in[(i * kThreads + threadIdx.x) % a.stride];
  a.out[threadIdx.x] = sum;
}

// One lane runs far ahead of lanes that never come.
__global__ void one_lane(Arguments a) {
  float sum = 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < a.count; ++i) sum += a.in[i % a.stride];
  }
  __syncthreads();
  a.out[threadIdx.x] = sum;
}

__global__ void float_atomics(float* out) { atomicAdd(&out[threadIdx.x], 1.0f); }

int main() {
  float *in, *out;
  const int bytes_of_each = 1 << 16;
  if (cudaMalloc(&in, bytes_of_each) != cudaSuccess || cudaMalloc(&out, bytes_of_each) != cudaSuccess) return 1;
  cudaMemset(in, 0, bytes_of_each);
  cudaMemset(out, 0, bytes_of_each);
  one_piece<<<1, kThreads>>>(reinterpret_cast<const Aligned*>(in), reinterpret_cast<Aligned*>(out));
  by_cast<<<1, kThreads>>>(in, out);
  two_pieces<<<1, kThreads>>>(reinterpret_cast<const Wide*>(in), reinterpret_cast<Wide*>(out));
  four_pieces<<<1, kThreads>>>(reinterpret_cast<const Loose*>(in), out);
  three_pieces<<<1, kThreads>>>(reinterpret_cast<const float3*>(in), out);
  bytes<<<1, kThreads>>>(reinterpret_cast<const uchar3*>(in), reinterpret_cast<uchar3*>(out));
  loaded_once<<<1, kThreads>>>(in, out);
  only_stores<<<1, kThreads>>>(Arguments{in, out, 3, 0});
  device_variable<<<1, kThreads>>>(out);
  wide_shared<<<1, kThreads>>>(out);
  some_lanes<<<1, kThreads>>>(in, out);
  many<<<1, kThreads>>>(Arguments{in, out, 4096, 20000});
  one_lane<<<1, kThreads>>>(Arguments{in, out, 4096, 20000});
  float_atomics<<<2, kThreads>>>(out);
  std::printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
  return 0;
}
