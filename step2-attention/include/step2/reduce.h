// Reductions: 32 lanes into one value by shuffles, then the warps of a block through shared memory.
//
// Every thread gets the result, and the order of the additions depends on nothing but the number of threads: two runs,
// and two lanes, agree to the last bit.
#pragma once

#include <cuda_runtime.h>
#include <math.h>

namespace kf::KF_BACKEND {

constexpr int kWarpSize = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

// The greater of two. A NaN loses against a number, so that all lanes settle on the same maximum.
template <class T>
__device__ __forceinline__ T greater_of(T a, T b) {
  return a > b ? a : b;
}
__device__ __forceinline__ float greater_of(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double greater_of(double a, double b) { return fmax(a, b); }

// Step by step each lane adds the value of the lane 16, 8, 4, 2, 1 places away. After five steps it has added all 32.
// All 32 lanes must call it.
template <class T>
__device__ __forceinline__ T warp_sum(T v) {
#pragma unroll
  for (int away = kWarpSize / 2; away > 0; away /= 2) v += __shfl_xor_sync(kFullWarp, v, away);
  return v;
}

template <class T>
__device__ __forceinline__ T warp_max(T v) {
#pragma unroll
  for (int away = kWarpSize / 2; away > 0; away /= 2) v = greater_of(v, __shfl_xor_sync(kFullWarp, v, away));
  return v;
}

// The same among four neighbouring lanes, which hold a row of what mma and wgmma leave.
template <class T>
__device__ __forceinline__ T quad_sum(T v) {
  v += __shfl_xor_sync(kFullWarp, v, 1);
  return v + __shfl_xor_sync(kFullWarp, v, 2);
}

template <class T>
__device__ __forceinline__ T quad_max(T v) {
  v = greater_of(v, __shfl_xor_sync(kFullWarp, v, 1));
  return greater_of(v, __shfl_xor_sync(kFullWarp, v, 2));
}

// Each warp leaves its result in `shared` (32 T), and every thread goes through those of all warps: they are few, and
// threads that read the same word get it in one go. All threads of the block must call it, in a one-dimensional block
// of a multiple of 32 threads. The last barrier lets the next call reuse `shared` at once; the caller's own earlier use
// of `shared` must be over, by a barrier, before the call.
template <class T>
__device__ T block_sum(T v, T* shared) {
  v = warp_sum(v);
  if (threadIdx.x % kWarpSize == 0) shared[threadIdx.x / kWarpSize] = v;
  __syncthreads();
  T sum = shared[0];
  for (unsigned warp = 1; warp < blockDim.x / kWarpSize; ++warp) sum += shared[warp];
  __syncthreads();
  return sum;
}

template <class T>
__device__ T block_max(T v, T* shared) {
  v = warp_max(v);
  if (threadIdx.x % kWarpSize == 0) shared[threadIdx.x / kWarpSize] = v;
  __syncthreads();
  T max = shared[0];
  for (unsigned warp = 1; warp < blockDim.x / kWarpSize; ++warp) max = greater_of(max, shared[warp]);
  __syncthreads();
  return max;
}

}  // namespace kf::KF_BACKEND
