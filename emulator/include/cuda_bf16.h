// __nv_bfloat16 and __nv_bfloat162 with conversions of their own. See emulator/README.md.
#pragma once

#include "cuda_runtime.h"
#include "kf_simt/half_ops.h"

namespace kf::simt {

struct alignas(2) __nv_bfloat16_raw {
  unsigned short x;
};

struct alignas(2) __nv_bfloat16 {
  KF_SIMT_HALF_MEMBERS(__nv_bfloat16, bfloat16_to_float, float_to_bfloat16, double_to_bfloat16)
#ifndef __CUDA_NO_BFLOAT16_CONVERSIONS__
  KF_SIMT_HALF_CONVERSIONS(__nv_bfloat16)
#endif
};

struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
  __nv_bfloat162() = default;
  __nv_bfloat162(__nv_bfloat16 x_, __nv_bfloat16 y_) : x(x_), y(y_) {}
};

using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

KF_SIMT_HALF_TYPE(__nv_bfloat16, __nv_bfloat162)
#ifndef __CUDA_NO_BFLOAT16_OPERATORS__
KF_SIMT_HALF1_OPERATORS(__nv_bfloat16)
#endif
#ifndef __CUDA_NO_BFLOAT162_OPERATORS__
KF_SIMT_HALF2_OPERATORS(__nv_bfloat162)
#endif
KF_SIMT_HALF_INTEGERS(__nv_bfloat16, bfloat16)
KF_SIMT_HALF_ROUNDINGS(__nv_bfloat16, bfloat16, float_to_bfloat16, bfloat16_to_float)
KF_SIMT_HALF_NAMES(__nv_bfloat16, __nv_bfloat162, bfloat16)

}  // namespace kf::simt
