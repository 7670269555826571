// Division by a number that is the same for all threads, without a division.
//
// A GPU has no instruction for integer division; 64-bit division is a subroutine of about a hundred instructions. With
// m = ⌈2⁶⁴/d⌉ known beforehand, n/d is the upper half of the 128-bit product n·m. Method: Granlund and Montgomery,
// Division by Invariant Integers using Multiplication, 1994, https://doi.org/10.1145/178243.178249.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

namespace kf::KF_BACKEND {

class FastDivide {
 public:
  explicit FastDivide(int64_t divisor)
      : divisor_(static_cast<uint64_t>(divisor)), multiplier_(divisor > 1 ? ~uint64_t{0} / divisor_ + 1 : 0) {}

  // m is too large by less than 1, so the quotient is exact while n·d < 2⁶⁴.
  __device__ __forceinline__ int64_t quotient(int64_t n) const {
    if (multiplier_ == 0) return n;  // division by 1: m would be 2⁶⁴
    return static_cast<int64_t>(__umul64hi(static_cast<uint64_t>(n), multiplier_));
  }
  __device__ __forceinline__ int64_t remainder(int64_t n) const {
    return n - quotient(n) * static_cast<int64_t>(divisor_);
  }

 private:
  uint64_t divisor_;
  uint64_t multiplier_;
};

// For `can_implement`: FastDivide is exact for all elements i < rows·width of a matrix where i·width stays below 2⁶³.
// Why not, or "".
inline std::string too_large_for_fast_divide(int64_t rows, int64_t width) {
  return rows * width <= INT64_MAX / width ? "" : "takes rows·width² < 2⁶³";
}

}  // namespace kf::KF_BACKEND
