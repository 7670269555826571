// Tensor maps for tma.h, made on the host. The function that makes them belongs to the driver; it is asked for by its
// name, so that a library that uses it loads on machines without a driver.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <kf/launch.h>
#include <step2/tma.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace kf::KF_BACKEND {

template <class T>
constexpr CUtensorMapDataType tensor_map_type() {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  if constexpr (std::is_same_v<T, __half>) return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  if constexpr (std::is_same_v<T, float>) return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  if constexpr (std::is_same_v<T, uint8_t>) return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  if constexpr (std::is_same_v<T, uint16_t>) return CU_TENSOR_MAP_DATA_TYPE_UINT16;
  if constexpr (std::is_same_v<T, int32_t>) return CU_TENSOR_MAP_DATA_TYPE_INT32;
  return CU_TENSOR_MAP_DATA_TYPE_UINT32;
}

// A map of `data`, in the GPU's memory at a multiple of 16 bytes. size: elements of each dimension, the innermost
// first. stride: bytes from one element to the next along dimensions 1, 2, …, multiples of 16; the innermost lie side
// by side. box: elements that one copy moves, at most 256 each; along the innermost dimension a multiple of 16 bytes,
// and as many bytes as the swizzle has. Throws std::runtime_error where the driver refuses.
template <class T, size_t kRank>
CUtensorMap make_tensor_map(const T* data, const std::array<uint64_t, kRank>& size,
                            const std::array<uint64_t, kRank - 1>& stride, const std::array<uint32_t, kRank>& box,
                            Swizzle swizzle, bool nan_outside = false) {
  static_assert(kRank >= 1 && kRank <= 5, "one to five dimensions");
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static Encode const encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
          "cudaGetDriverEntryPointByVersion");
    if (found != cudaDriverEntryPointSuccess) throw std::runtime_error("this driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(function);
  }();
  std::array<uint32_t, kRank> step;
  step.fill(1);
  CUtensorMap map;
  // The driver wants an array of strides also where there is none to read.
  const CUresult result =
      encode(&map, tensor_map_type<T>(), kRank, const_cast<void*>(static_cast<const void*>(data)), size.data(),
             kRank > 1 ? stride.data() : size.data(), box.data(), step.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
             swizzle == Swizzle::k128  ? CU_TENSOR_MAP_SWIZZLE_128B
             : swizzle == Swizzle::k64 ? CU_TENSOR_MAP_SWIZZLE_64B
             : swizzle == Swizzle::k32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                       : CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             nan_outside ? CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA : CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled refuses this tensor: error " +
                             std::to_string(static_cast<int>(result)));
  }
  return map;
}

}  // namespace kf::KF_BACKEND
