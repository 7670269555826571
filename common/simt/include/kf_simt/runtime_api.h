// The part of CUDA's runtime API that kernels' tests and small programs need. Everything happens at once: a stream is
// only a name, and a copy or a launch has finished when the call returns.
#pragma once

#include <functional>
#include <utility>

#include "kf_simt/launch.h"

namespace kf::simt {

enum cudaError {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidSymbol = 13,
  cudaErrorInvalidMemcpyDirection = 21,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
  cudaErrorLaunchOutOfResources = 701,
  cudaErrorPeerAccessAlreadyEnabled = 704,
  cudaErrorLaunchFailure = 719,
  cudaErrorCooperativeLaunchTooLarge = 720,
  cudaErrorNotSupported = 801,
  cudaErrorUnknown = 999,
};
typedef cudaError cudaError_t;

const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();

// Devices: there is one.
struct cudaUUID_t {
  char bytes[16];
};
struct cudaDeviceProp {
  char name[256];
  cudaUUID_t uuid;
  std::size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
  std::size_t reservedSharedMemPerBlock, totalConstMem;
  int regsPerBlock, regsPerMultiprocessor, warpSize, maxThreadsPerBlock, maxThreadsPerMultiProcessor;
  int maxBlocksPerMultiProcessor, maxThreadsDim[3], maxGridSize[3], major, minor, multiProcessorCount;
  int l2CacheSize, memoryBusWidth, concurrentKernels, cooperativeLaunch, integrated, managedMemory, unifiedAddressing;
  int canMapHostMemory, asyncEngineCount, ECCEnabled, pciBusID, pciDeviceID, pciDomainID;
};
enum cudaDeviceAttr {
  cudaDevAttrMaxThreadsPerBlock = 1,
  cudaDevAttrMaxBlockDimX = 2,
  cudaDevAttrMaxBlockDimY = 3,
  cudaDevAttrMaxBlockDimZ = 4,
  cudaDevAttrMaxGridDimX = 5,
  cudaDevAttrMaxGridDimY = 6,
  cudaDevAttrMaxGridDimZ = 7,
  cudaDevAttrMaxSharedMemoryPerBlock = 8,
  cudaDevAttrWarpSize = 10,
  cudaDevAttrMaxRegistersPerBlock = 12,
  cudaDevAttrClockRate = 13,
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrMemoryClockRate = 36,
  cudaDevAttrGlobalMemoryBusWidth = 37,
  cudaDevAttrL2CacheSize = 38,
  cudaDevAttrMaxThreadsPerMultiProcessor = 39,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrMaxRegistersPerMultiprocessor = 82,
  cudaDevAttrManagedMemory = 83,
  cudaDevAttrConcurrentManagedAccess = 89,
  cudaDevAttrCooperativeLaunch = 95,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
  cudaDevAttrMaxBlocksPerMultiprocessor = 106,
};
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaDeviceReset();
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaDriverGetVersion(int* version);

// Memory. What is allocated holds NaN (bytes 0xff) until it is written.
enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4,
};
constexpr unsigned cudaMemAttachGlobal = 1;
constexpr unsigned cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2;
constexpr int cudaCpuDeviceId = -1;
cudaError_t cudaMalloc(void** memory, std::size_t bytes);
cudaError_t cudaMallocManaged(void** memory, std::size_t bytes, unsigned flags = cudaMemAttachGlobal);
cudaError_t cudaMallocHost(void** memory, std::size_t bytes, unsigned flags = cudaHostAllocDefault);
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned flags);
cudaError_t cudaMallocAsync(void** memory, std::size_t bytes, cudaStream_t stream);
cudaError_t cudaFree(void* memory);
cudaError_t cudaFreeHost(void* memory);
cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream);
cudaError_t cudaMemGetInfo(std::size_t* available, std::size_t* total);
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);
cudaError_t cudaMemcpy2D(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width,
                         std::size_t height, cudaMemcpyKind kind);
cudaError_t cudaMemset(void* memory, int value, std::size_t bytes);
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t stream = nullptr);
cudaError_t cudaMemPrefetchAsync(const void* memory, std::size_t bytes, int device, cudaStream_t stream = nullptr);

template <class T>
cudaError_t cudaMalloc(T** memory, std::size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(memory), bytes);
}
template <class T>
cudaError_t cudaMallocManaged(T** memory, std::size_t bytes, unsigned flags = cudaMemAttachGlobal) {
  return cudaMallocManaged(reinterpret_cast<void**>(memory), bytes, flags);
}
template <class T>
cudaError_t cudaMallocHost(T** memory, std::size_t bytes, unsigned flags = cudaHostAllocDefault) {
  return cudaMallocHost(reinterpret_cast<void**>(memory), bytes, flags);
}
template <class T>
cudaError_t cudaHostAlloc(T** memory, std::size_t bytes, unsigned flags) {
  return cudaHostAlloc(reinterpret_cast<void**>(memory), bytes, flags);
}
template <class T>
cudaError_t cudaMallocAsync(T** memory, std::size_t bytes, cudaStream_t stream) {
  return cudaMallocAsync(reinterpret_cast<void**>(memory), bytes, stream);
}

// A __device__ or __constant__ variable is an ordinary one here.
cudaError_t copy_symbol(void* to, const void* from, std::size_t bytes, std::size_t symbol_bytes, std::size_t offset);
template <class T>
cudaError_t cudaMemcpyToSymbol(const T& symbol, const void* from, std::size_t bytes, std::size_t offset = 0,
                               cudaMemcpyKind = cudaMemcpyHostToDevice) {
  auto* const to = const_cast<char*>(reinterpret_cast<const volatile char*>(&symbol));
  return copy_symbol(to + offset, from, bytes, sizeof(symbol), offset);
}
template <class T>
cudaError_t cudaMemcpyFromSymbol(void* to, const T& symbol, std::size_t bytes, std::size_t offset = 0,
                                 cudaMemcpyKind = cudaMemcpyDeviceToHost) {
  const auto* const from = const_cast<const char*>(reinterpret_cast<const volatile char*>(&symbol));
  return copy_symbol(to, from + offset, bytes, sizeof(symbol), offset);
}
template <class T>
cudaError_t cudaMemcpyToSymbolAsync(const T& symbol, const void* from, std::size_t bytes, std::size_t offset,
                                    cudaMemcpyKind kind, cudaStream_t = nullptr) {
  return cudaMemcpyToSymbol(symbol, from, bytes, offset, kind);
}
template <class T>
cudaError_t cudaMemcpyFromSymbolAsync(void* to, const T& symbol, std::size_t bytes, std::size_t offset,
                                      cudaMemcpyKind kind, cudaStream_t = nullptr) {
  return cudaMemcpyFromSymbol(to, symbol, bytes, offset, kind);
}
template <class T>
cudaError_t cudaGetSymbolAddress(void** address, const T& symbol) {
  *address = const_cast<void*>(reinterpret_cast<const volatile void*>(&symbol));
  return cudaSuccess;
}
template <class T>
cudaError_t cudaGetSymbolSize(std::size_t* bytes, const T& symbol) {
  *bytes = sizeof(symbol);
  return cudaSuccess;
}

// Streams and events.
typedef struct CUevent_st* cudaEvent_t;
constexpr unsigned cudaStreamDefault = 0, cudaStreamNonBlocking = 1;
constexpr unsigned cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2;
cudaError_t cudaStreamCreate(cudaStream_t* stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end);

// Functions.
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9,
};
enum cudaFuncCache {
  cudaFuncCachePreferNone,
  cudaFuncCachePreferShared,
  cudaFuncCachePreferL1,
  cudaFuncCachePreferEqual
};
constexpr int cudaSharedmemCarveoutDefault = -1, cudaSharedmemCarveoutMaxShared = 100, cudaSharedmemCarveoutMaxL1 = 0;
struct cudaFuncAttributes {
  std::size_t sharedSizeBytes;  // 0 until the kernel has run once
  std::size_t constSizeBytes, localSizeBytes;
  int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, maxDynamicSharedSizeBytes;
};
KernelInfo* probe_kernel(void (*call)(void*), void* context);
cudaError_t set_attribute(KernelInfo* kernel, cudaFuncAttribute attribute, int value);
cudaError_t get_attributes(cudaFuncAttributes* attributes, KernelInfo* kernel);
cudaError_t max_active_blocks(int* blocks, KernelInfo* kernel, int threads, std::size_t shared);
cudaError_t max_potential_block_size(int* min_grid, int* block, KernelInfo* kernel, std::size_t shared, int limit);

// The record of a kernel: it is called with arguments made of zeros and stops before its first statement.
template <class... Params>
KernelInfo* kernel_info(void (*kernel)(Params...)) {
  auto call = [kernel] {
    struct Zeros {
      alignas(16) unsigned char bytes[max_align(sizeof(int), (sizeof(std::size_t) + ... + sizeof(Params)))];
    };
    static Zeros zeros;
    kernel(reinterpret_cast<std::decay_t<Params>&>(zeros)...);
  };
  return probe_kernel([](void* context) { (*static_cast<decltype(call)*>(context))(); }, &call);
}

// The rewriter takes casts to void* off the kernel in calls of these functions: its type must be known here.
template <class... Params>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Params...), cudaFuncAttribute attribute, int value) {
  return set_attribute(kernel_info(kernel), attribute, value);
}
template <class... Params>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*kernel)(Params...)) {
  return get_attributes(attributes, kernel_info(kernel));
}
template <class... Params>
cudaError_t cudaFuncSetCacheConfig(void (*)(Params...), cudaFuncCache) {
  return cudaSuccess;
}
template <class... Params>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void (*kernel)(Params...), int threads,
                                                          std::size_t shared) {
  return max_active_blocks(blocks, kernel_info(kernel), threads, shared);
}
template <class... Params>
cudaError_t cudaOccupancyMaxPotentialBlockSize(int* min_grid, int* block, void (*kernel)(Params...),
                                               std::size_t shared = 0, int limit = 0) {
  return max_potential_block_size(min_grid, block, kernel_info(kernel), shared, limit);
}

template <class... Params, std::size_t... I>
cudaError_t launch_with(LaunchConfig config, void (*kernel)(Params...), void** arguments, std::index_sequence<I...>) {
  auto call = [&] { kernel(*static_cast<std::decay_t<Params>*>(arguments[I])...); };
  run(config, [](void* context) { (*static_cast<decltype(call)*>(context))(); }, &call);
  return cudaPeekAtLastError();
}
template <class... Params>
cudaError_t cudaLaunchKernel(void (*kernel)(Params...), dim3 grid, dim3 block, void** arguments, std::size_t shared = 0,
                             cudaStream_t = nullptr, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return launch_with({"cudaLaunchKernel", file, line, grid, block, shared, false}, kernel, arguments,
                     std::index_sequence_for<Params...>());
}
template <class... Params>
cudaError_t cudaLaunchCooperativeKernel(void (*kernel)(Params...), dim3 grid, dim3 block, void** arguments,
                                        std::size_t shared = 0, cudaStream_t = nullptr,
                                        const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return launch_with({"cudaLaunchCooperativeKernel", file, line, grid, block, shared, true}, kernel, arguments,
                     std::index_sequence_for<Params...>());
}

enum cudaLaunchAttributeID {
  cudaLaunchAttributeIgnore = 0,
  cudaLaunchAttributeCooperative = 2,
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6,
};
union cudaLaunchAttributeValue {
  int cooperative;
  int programmaticStreamSerializationAllowed;
  struct {
    unsigned x, y, z;
  } clusterDim;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};
// What the attributes ask for: an error for clusters, which are not emulated.
cudaError_t read_attributes(const cudaLaunchConfig_t& config, bool* cooperative);
template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args&&... args) {
  bool cooperative = false;
  if (const cudaError_t error = read_attributes(*config, &cooperative)) return error;
  auto call = [&](auto&... converted) { kernel(converted...); };
  auto bound = [&](std::decay_t<Params>... converted) {
    KernelCall<decltype(call)> launch(call, {"cudaLaunchKernelEx", __FILE__, __LINE__, config->gridDim,
                                             config->blockDim, config->dynamicSmemBytes, cooperative});
    launch.launch(converted...);
  };
  bound(std::forward<Args>(args)...);
  return cudaPeekAtLastError();
}

inline cudaError_t cudaProfilerStart() { return cudaSuccess; }
inline cudaError_t cudaProfilerStop() { return cudaSuccess; }

}  // namespace kf::simt
