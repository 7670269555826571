// Element types: kernels read and write T, and compute in float (double when T is double).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <kf/rung.h>

#include <stdexcept>
#include <type_traits>

namespace kf::KF_BACKEND {

template <class T>
struct Type {
  using element = T;
};

// The type that sums and functions of T are computed in.
template <class T>
struct Compute {
  using type = float;
};
template <>
struct Compute<double> {
  using type = double;
};
template <class T>
using compute_t = typename Compute<T>::type;

__device__ __forceinline__ float to_compute(float x) { return x; }
__device__ __forceinline__ double to_compute(double x) { return x; }
__device__ __forceinline__ float to_compute(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_compute(__nv_bfloat16 x) { return __bfloat162float(x); }

// Rounds to nearest even. Explicit conversions, because torch's build flags switch the implicit ones off.
template <class T>
__device__ __forceinline__ T from_compute(compute_t<T> x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

// Two at once: one instruction on GPUs since compute capability 8.0.
__device__ __forceinline__ void round_pair(float a, float b, __half& low, __half& high) {
  const __half2 pair = __floats2half2_rn(a, b);
  low = pair.x;
  high = pair.y;
}
__device__ __forceinline__ void round_pair(float a, float b, __nv_bfloat16& low, __nv_bfloat16& high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  low = pair.x;
  high = pair.y;
}

// Calls f(Type<T>{}) with the C++ type that `dtype` names.
template <class F>
void with_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32: return f(Type<float>{});
    case DType::kFloat16: return f(Type<__half>{});
    case DType::kBFloat16: return f(Type<__nv_bfloat16>{});
    case DType::kFloat64: return f(Type<double>{});
  }
  throw std::invalid_argument("with_type: unknown dtype");
}

// The same for rungs that take half types only.
template <class F>
void with_half_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16: return f(Type<__half>{});
    case DType::kBFloat16: return f(Type<__nv_bfloat16>{});
    default: throw std::invalid_argument("with_half_type: not a half type");
  }
}

}  // namespace kf::KF_BACKEND
