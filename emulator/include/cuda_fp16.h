// __half and __half2 with conversions of their own. See emulator/README.md.
#pragma once

#include "cuda_runtime.h"
#include "kf_simt/half_ops.h"

namespace kf::simt {

struct alignas(2) __half_raw {
  unsigned short x;
};

struct alignas(2) __half {
  KF_SIMT_HALF_MEMBERS(__half, half_to_float, float_to_half, double_to_half)
#ifndef __CUDA_NO_HALF_CONVERSIONS__
  KF_SIMT_HALF_CONVERSIONS(__half)
#endif
};

struct alignas(4) __half2 {
  __half x, y;
  __half2() = default;
  __half2(__half x_, __half y_) : x(x_), y(y_) {}
};

using half = __half;
using half2 = __half2;
using nv_half = __half;
using nv_half2 = __half2;
using __nv_half = __half;

KF_SIMT_HALF_TYPE(__half, __half2)
#ifndef __CUDA_NO_HALF_OPERATORS__
KF_SIMT_HALF1_OPERATORS(__half)
#endif
#ifndef __CUDA_NO_HALF2_OPERATORS__
KF_SIMT_HALF2_OPERATORS(__half2)
#endif
KF_SIMT_HALF_INTEGERS(__half, half)
KF_SIMT_HALF_ROUNDINGS(__half, half, float_to_half, half_to_float)
KF_SIMT_HALF_NAMES(__half, __half2, half)

}  // namespace kf::simt
