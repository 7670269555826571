// What the special-function unit computes in one instruction.
#pragma once

#include <cuda_runtime.h>
#include <math.h>

namespace kf::KF_BACKEND {

// 2^x and 1/x by the special-function unit: one instruction each, relative error about 2^-22. The functions exp2f and
// a division by `/` add instructions for denormal numbers, which here are 0, and for the last bit.
// PTX: ex2.approx.ftz, rcp.approx.ftz
__device__ __forceinline__ float exp2_approx(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}
__device__ __forceinline__ float reciprocal_approx(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}

}  // namespace kf::KF_BACKEND
