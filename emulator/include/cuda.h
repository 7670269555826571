// The driver API, as far as kernels' hosts reach for it: tensor maps, which only it can make.
#pragma once

#include "cuda_runtime.h"
#include "kf_simt/tensor_map.h"

#define CUDA_VERSION 12080
#define CUDAAPI
#define CU_TENSOR_MAP_NUM_QWORDS 16

// g++ notes at every kernel that takes a tensor map that g++ 4.6 passed such a parameter in another way.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace kf::simt {

enum CUresult {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_NOT_FOUND = 500,
  CUDA_ERROR_NOT_SUPPORTED = 801,
  CUDA_ERROR_UNKNOWN = 999,
};
typedef std::uint32_t cuuint32_t;
typedef std::uint64_t cuuint64_t;

struct alignas(64) CUtensorMap {
  cuuint64_t opaque[CU_TENSOR_MAP_NUM_QWORDS];
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap), "");

enum CUtensorMapDataType {
  CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0,
  CU_TENSOR_MAP_DATA_TYPE_UINT16,
  CU_TENSOR_MAP_DATA_TYPE_UINT32,
  CU_TENSOR_MAP_DATA_TYPE_INT32,
  CU_TENSOR_MAP_DATA_TYPE_UINT64,
  CU_TENSOR_MAP_DATA_TYPE_INT64,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT64,
  CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT32_FTZ,
  CU_TENSOR_MAP_DATA_TYPE_TFLOAT32,
  CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ,
};
enum CUtensorMapInterleave {
  CU_TENSOR_MAP_INTERLEAVE_NONE = 0,
  CU_TENSOR_MAP_INTERLEAVE_16B,
  CU_TENSOR_MAP_INTERLEAVE_32B,
};
enum CUtensorMapSwizzle {
  CU_TENSOR_MAP_SWIZZLE_NONE = 0,
  CU_TENSOR_MAP_SWIZZLE_32B,
  CU_TENSOR_MAP_SWIZZLE_64B,
  CU_TENSOR_MAP_SWIZZLE_128B,
};
enum CUtensorMapL2promotion {
  CU_TENSOR_MAP_L2_PROMOTION_NONE = 0,
  CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
  CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
  CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
};
enum CUtensorMapFloatOOBfill {
  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0,
  CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA,
};

// Describes a tensor of `rank` dimensions, the innermost first, and the box that one copy moves.
// CUDA_ERROR_INVALID_VALUE where the driver's documented rules are broken; CUDA_ERROR_NOT_SUPPORTED for interleaved
// layouts.
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* size, const cuuint64_t* stride, const cuuint32_t* box,
                                const cuuint32_t* step, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill);
CUresult cuTensorMapReplaceAddress(CUtensorMap* map, void* address);
CUresult cuGetErrorName(CUresult error, const char** name);
CUresult cuGetErrorString(CUresult error, const char** text);
inline CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

typedef decltype(&cuTensorMapEncodeTiled) PFN_cuTensorMapEncodeTiled;
typedef PFN_cuTensorMapEncodeTiled PFN_cuTensorMapEncodeTiled_v12000;

// Finds the functions above by their names, as programs do that are not linked with the driver.
enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess = 0,
  cudaDriverEntryPointSymbolNotFound = 1,
  cudaDriverEntryPointVersionNotSufficent = 2,
};
constexpr unsigned long long cudaEnableDefault = 0, cudaEnableLegacyStream = 1, cudaEnablePerThreadDefaultStream = 2;
cudaError_t find_driver_function(const char* name, void** function, cudaDriverEntryPointQueryResult* result);
template <class Function>
cudaError_t cudaGetDriverEntryPoint(const char* name, Function** function, unsigned long long = cudaEnableDefault,
                                    cudaDriverEntryPointQueryResult* result = nullptr) {
  return find_driver_function(name, reinterpret_cast<void**>(function), result);
}
template <class Function>
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, Function** function, unsigned,
                                             unsigned long long = cudaEnableDefault,
                                             cudaDriverEntryPointQueryResult* result = nullptr) {
  return find_driver_function(name, reinterpret_cast<void**>(function), result);
}

}  // namespace kf::simt
