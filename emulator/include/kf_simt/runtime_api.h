// The part of CUDA's runtime API that kernels' tests and small programs need. Everything happens at once: a stream is
// only a name, and a copy or a launch has finished when the call returns.
#pragma once

#include <functional>
#include <tuple>
#include <utility>

#include "kf_simt/launch.h"

#define CUDART_VERSION 13000
#define CUDART_CB

namespace kf::simt {

enum cudaError {
#define KF_SIMT_ERROR(name, value, text) name = value,
#include "kf_simt/errors.h"
#undef KF_SIMT_ERROR
};
typedef cudaError cudaError_t;

template <class T, class Value>
cudaError_t kf_give(T* to, Value value) {
  *to = static_cast<T>(value);
  return cudaSuccess;
}

const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();

// Devices: there is one.
struct cudaUUID_t {
  char bytes[16];
};
// The fields of CUDA 13, and those of CUDA 12 that 13 has dropped. What means nothing here is 0.
struct cudaDeviceProp {
  char name[256];
  cudaUUID_t uuid;
  char luid[8];
  unsigned luidDeviceNodeMask;
  std::size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
  std::size_t reservedSharedMemPerBlock, totalConstMem, memPitch;
  std::size_t textureAlignment, texturePitchAlignment, surfaceAlignment;
  int regsPerBlock, regsPerMultiprocessor, warpSize, maxThreadsPerBlock, maxThreadsPerMultiProcessor;
  int maxBlocksPerMultiProcessor, maxThreadsDim[3], maxGridSize[3], major, minor, multiProcessorCount;
  int l2CacheSize, persistingL2CacheMaxSize, accessPolicyMaxWindowSize, memoryBusWidth;
  int concurrentKernels, cooperativeLaunch, clusterLaunch, integrated, managedMemory, concurrentManagedAccess;
  int unifiedAddressing, canMapHostMemory, asyncEngineCount, ECCEnabled, pciBusID, pciDeviceID, pciDomainID, tccDriver;
  int streamPrioritiesSupported, globalL1CacheSupported, localL1CacheSupported, isMultiGpuBoard, multiGpuBoardGroupID;
  int hostNativeAtomicSupported, pageableMemoryAccess, computePreemptionSupported, canUseHostPointerForRegisteredMem;
  int pageableMemoryAccessUsesHostPageTables, directManagedMemAccessFromHost, hostRegisterSupported;
  int hostRegisterReadOnlySupported, sparseCudaArraySupported, timelineSemaphoreInteropSupported;
  int memoryPoolsSupported, gpuDirectRDMASupported, gpuDirectRDMAWritesOrdering, deferredMappingCudaArraySupported;
  unsigned gpuDirectRDMAFlushWritesOptions, memoryPoolSupportedHandleTypes;
  int ipcEventSupported, unifiedFunctionPointers, deviceNumaConfig, deviceNumaId, mpsEnabled, hostNumaId;
  unsigned gpuPciDeviceID, gpuPciSubsystemID;
  int hostNumaMultinodeIpcSupported;
  int maxTexture1D, maxTexture1DMipmap, maxTexture1DLinear, maxTexture2D[2], maxTexture2DMipmap[2];
  int maxTexture2DLinear[3], maxTexture2DGather[2], maxTexture3D[3], maxTexture3DAlt[3], maxTextureCubemap;
  int maxTexture1DLayered[2], maxTexture2DLayered[3], maxTextureCubemapLayered[2], maxSurface1D, maxSurface2D[2];
  int maxSurface3D[3], maxSurface1DLayered[2], maxSurface2DLayered[3], maxSurfaceCubemap, maxSurfaceCubemapLayered[2];
  int clockRate, memoryClockRate, deviceOverlap, computeMode, kernelExecTimeoutEnabled,
      singleToDoublePrecisionPerfRatio;
  int cooperativeMultiDeviceLaunch;
};
enum cudaDeviceAttr {
#define KF_SIMT_ATTRIBUTE(name, value, member) name = value,
#include "kf_simt/attributes.h"
#undef KF_SIMT_ATTRIBUTE
};
enum cudaComputeMode {
  cudaComputeModeDefault = 0,
  cudaComputeModeExclusive = 1,
  cudaComputeModeProhibited = 2,
  cudaComputeModeExclusiveProcess = 3,
};
inline cudaError_t cudaGetDeviceCount(int* count) { return kf_give(count, 1); }
inline cudaError_t cudaGetDevice(int* device) { return kf_give(device, 0); }
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaDeviceReset();
inline cudaError_t cudaChooseDevice(int* device, const cudaDeviceProp*) { return kf_give(device, 0); }
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device);
enum cudaDeviceP2PAttr {
  cudaDevP2PAttrPerformanceRank = 1,
  cudaDevP2PAttrAccessSupported = 2,
  cudaDevP2PAttrNativeAtomicSupported = 3,
  cudaDevP2PAttrCudaArrayAccessSupported = 4,
};
cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr attribute, int device, int peer);
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer);
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags);
cudaError_t cudaDeviceDisablePeerAccess(int peer);
constexpr unsigned cudaDeviceScheduleAuto = 0, cudaDeviceScheduleSpin = 1, cudaDeviceScheduleYield = 2;
constexpr unsigned cudaDeviceScheduleBlockingSync = 4, cudaDeviceBlockingSync = 4, cudaDeviceMapHost = 8;
inline cudaError_t cudaSetDeviceFlags(unsigned) { return cudaSuccess; }
inline cudaError_t cudaGetDeviceFlags(unsigned* flags) { return kf_give(flags, cudaDeviceMapHost); }
inline cudaError_t cudaInitDevice(int device, unsigned, unsigned) { return cudaSetDevice(device); }
enum cudaLimit {
  cudaLimitStackSize = 0,
  cudaLimitPrintfFifoSize = 1,
  cudaLimitMallocHeapSize = 2,
  cudaLimitDevRuntimeSyncDepth = 3,
  cudaLimitDevRuntimePendingLaunchCount = 4,
  cudaLimitMaxL2FetchGranularity = 5,
  cudaLimitPersistingL2CacheSize = 6,
};
// A limit is remembered and limits nothing.
cudaError_t cudaDeviceSetLimit(cudaLimit limit, std::size_t value);
cudaError_t cudaDeviceGetLimit(std::size_t* value, cudaLimit limit);
inline cudaError_t cudaCtxResetPersistingL2Cache() { return cudaSuccess; }
inline cudaError_t cudaThreadSynchronize() { return cudaDeviceSynchronize(); }
inline cudaError_t cudaThreadExit() { return cudaDeviceReset(); }
inline cudaError_t cudaRuntimeGetVersion(int* version) { return kf_give(version, CUDART_VERSION); }
inline cudaError_t cudaDriverGetVersion(int* version) { return kf_give(version, CUDART_VERSION); }

// Memory. What is allocated holds NaN (bytes 0xff) until it is written.
enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4,
};
constexpr unsigned cudaMemAttachGlobal = 1, cudaMemAttachHost = 2, cudaMemAttachSingle = 4;
constexpr unsigned cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2;
constexpr unsigned cudaHostAllocWriteCombined = 4;
constexpr unsigned cudaHostRegisterDefault = 0, cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2;
constexpr unsigned cudaHostRegisterIoMemory = 4, cudaHostRegisterReadOnly = 8;
constexpr int cudaCpuDeviceId = -1, cudaInvalidDeviceId = -2;
struct cudaPitchedPtr {
  void* ptr;
  std::size_t pitch, xsize, ysize;
};
struct cudaExtent {
  std::size_t width, height, depth;  // width in bytes
};
struct cudaPos {
  std::size_t x, y, z;  // x in bytes
};
constexpr cudaPitchedPtr make_cudaPitchedPtr(void* memory, std::size_t pitch, std::size_t xsize, std::size_t ysize) {
  return {memory, pitch, xsize, ysize};
}
constexpr cudaExtent make_cudaExtent(std::size_t width, std::size_t height, std::size_t depth) {
  return {width, height, depth};
}
constexpr cudaPos make_cudaPos(std::size_t x, std::size_t y, std::size_t z) { return {x, y, z}; }
struct cudaMemcpy3DParms {  // without arrays
  cudaPos srcPos;
  cudaPitchedPtr srcPtr;
  cudaPos dstPos;
  cudaPitchedPtr dstPtr;
  cudaExtent extent;
  cudaMemcpyKind kind;
};
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice, cudaMemoryTypeManaged };
struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
  void* devicePointer;
  void* hostPointer;
};
enum cudaMemoryAdvise {
  cudaMemAdviseSetReadMostly = 1,
  cudaMemAdviseUnsetReadMostly = 2,
  cudaMemAdviseSetPreferredLocation = 3,
  cudaMemAdviseUnsetPreferredLocation = 4,
  cudaMemAdviseSetAccessedBy = 5,
  cudaMemAdviseUnsetAccessedBy = 6,
};
enum cudaMemLocationType {
  cudaMemLocationTypeInvalid = 0,
  cudaMemLocationTypeDevice = 1,
  cudaMemLocationTypeHost = 2,
  cudaMemLocationTypeHostNuma = 3,
  cudaMemLocationTypeHostNumaCurrent = 4,
};
struct cudaMemLocation {
  cudaMemLocationType type;
  int id;
};
cudaError_t cudaMalloc(void** memory, std::size_t bytes);
cudaError_t cudaMallocManaged(void** memory, std::size_t bytes, unsigned flags = cudaMemAttachGlobal);
cudaError_t cudaMallocHost(void** memory, std::size_t bytes, unsigned flags = cudaHostAllocDefault);
inline cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) { return cudaMallocHost(memory, bytes); }
inline cudaError_t cudaMallocAsync(void** memory, std::size_t bytes, cudaStream_t) { return cudaMalloc(memory, bytes); }
cudaError_t cudaFree(void* memory);
cudaError_t cudaFreeHost(void* memory);
inline cudaError_t cudaFreeAsync(void* memory, cudaStream_t) { return cudaFree(memory); }
cudaError_t cudaMemGetInfo(std::size_t* available, std::size_t* total);
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);
cudaError_t cudaMemcpy2D(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width,
                         std::size_t height, cudaMemcpyKind kind);
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                              std::size_t width, std::size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream = nullptr);
cudaError_t cudaMemcpy3D(const cudaMemcpy3DParms* parameters);
cudaError_t cudaMemcpy3DAsync(const cudaMemcpy3DParms* parameters, cudaStream_t stream = nullptr);
cudaError_t cudaMemcpyPeer(void* to, int to_device, const void* from, int from_device, std::size_t bytes);
cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, std::size_t bytes,
                                cudaStream_t stream = nullptr);
cudaError_t cudaMemset(void* memory, int value, std::size_t bytes);
inline cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t = nullptr) {
  return cudaMemset(memory, value, bytes);
}
cudaError_t cudaMemset2D(void* memory, std::size_t pitch, int value, std::size_t width, std::size_t height);
inline cudaError_t cudaMemset2DAsync(void* memory, std::size_t pitch, int value, std::size_t width, std::size_t height,
                                     cudaStream_t = nullptr) {
  return cudaMemset2D(memory, pitch, value, width, height);
}
cudaError_t cudaMemset3D(cudaPitchedPtr memory, int value, cudaExtent extent);
cudaError_t cudaMallocPitch(void** memory, std::size_t* pitch, std::size_t width, std::size_t height);
cudaError_t cudaMalloc3D(cudaPitchedPtr* memory, cudaExtent extent);
cudaError_t cudaHostRegister(void* memory, std::size_t bytes, unsigned flags);
cudaError_t cudaHostUnregister(void* memory);
cudaError_t cudaHostGetDevicePointer(void** device_memory, void* memory, unsigned flags);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* memory);

// Hints, which change nothing: with a device's number as in CUDA 12, with a location as in CUDA 13.
inline cudaError_t cudaMemPrefetchAsync(const void*, std::size_t, int, cudaStream_t = nullptr) { return cudaSuccess; }
inline cudaError_t cudaMemPrefetchAsync(const void*, std::size_t, cudaMemLocation, unsigned, cudaStream_t = nullptr) {
  return cudaSuccess;
}
inline cudaError_t cudaMemAdvise(const void*, std::size_t, cudaMemoryAdvise, int) { return cudaSuccess; }
inline cudaError_t cudaMemAdvise(const void*, std::size_t, cudaMemoryAdvise, cudaMemLocation) { return cudaSuccess; }
inline cudaError_t cudaStreamAttachMemAsync(cudaStream_t, void*, std::size_t = 0, unsigned = cudaMemAttachSingle) {
  return cudaSuccess;
}

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
cudaError_t cudaMallocPitch(T** memory, std::size_t* pitch, std::size_t width, std::size_t height) {
  return cudaMallocPitch(reinterpret_cast<void**>(memory), pitch, width, height);
}
template <class T>
cudaError_t cudaHostGetDevicePointer(T** device_memory, void* memory, unsigned flags) {
  return cudaHostGetDevicePointer(reinterpret_cast<void**>(device_memory), memory, flags);
}
template <class T>
cudaError_t cudaHostAlloc(T** memory, std::size_t bytes, unsigned flags) {
  return cudaHostAlloc(reinterpret_cast<void**>(memory), bytes, flags);
}
template <class T>
cudaError_t cudaMallocAsync(T** memory, std::size_t bytes, cudaStream_t stream) {
  return cudaMallocAsync(reinterpret_cast<void**>(memory), bytes, stream);
}

// A __device__ or __constant__ variable is an ordinary one here. One of `to` and `from` is null: the variable's end.
cudaError_t copy_symbol(void* symbol, std::size_t symbol_bytes, std::size_t offset, void* to, const void* from,
                        std::size_t bytes, cudaMemcpyKind kind, bool synchronises);
// Its address is now one of the device's memory.
void note_symbol(void* symbol, std::size_t bytes);
template <class T>
void* kf_address_of(const T& symbol) {
  return const_cast<char*>(reinterpret_cast<const volatile char*>(&symbol));
}
template <class T>
cudaError_t cudaMemcpyToSymbol(const T& symbol, const void* from, std::size_t bytes, std::size_t offset = 0,
                               cudaMemcpyKind kind = cudaMemcpyHostToDevice) {
  return copy_symbol(kf_address_of(symbol), sizeof(symbol), offset, nullptr, from, bytes, kind, true);
}
template <class T>
cudaError_t cudaMemcpyFromSymbol(void* to, const T& symbol, std::size_t bytes, std::size_t offset = 0,
                                 cudaMemcpyKind kind = cudaMemcpyDeviceToHost) {
  return copy_symbol(kf_address_of(symbol), sizeof(symbol), offset, to, nullptr, bytes, kind, true);
}
template <class T>
cudaError_t cudaMemcpyToSymbolAsync(const T& symbol, const void* from, std::size_t bytes, std::size_t offset = 0,
                                    cudaMemcpyKind kind = cudaMemcpyHostToDevice, cudaStream_t = nullptr) {
  return copy_symbol(kf_address_of(symbol), sizeof(symbol), offset, nullptr, from, bytes, kind, false);
}
template <class T>
cudaError_t cudaMemcpyFromSymbolAsync(void* to, const T& symbol, std::size_t bytes, std::size_t offset = 0,
                                      cudaMemcpyKind kind = cudaMemcpyDeviceToHost, cudaStream_t = nullptr) {
  return copy_symbol(kf_address_of(symbol), sizeof(symbol), offset, to, nullptr, bytes, kind, false);
}
template <class Pointer, class T>
cudaError_t cudaGetSymbolAddress(Pointer** address, const T& symbol) {
  note_symbol(kf_address_of(symbol), sizeof(symbol));
  *address = static_cast<Pointer*>(kf_address_of(symbol));
  return cudaSuccess;
}
template <class T>
cudaError_t cudaGetSymbolSize(std::size_t* bytes, const T& symbol) {
  return kf_give(bytes, sizeof(symbol));
}

// Streams and events.
typedef struct CUevent_st* cudaEvent_t;
constexpr unsigned cudaStreamDefault = 0, cudaStreamNonBlocking = 1;
constexpr unsigned cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2;
constexpr unsigned cudaEventInterprocess = 4, cudaEventRecordDefault = 0, cudaEventWaitDefault = 0;
typedef void (*cudaHostFn_t)(void* data);
typedef void (*cudaStreamCallback_t)(cudaStream_t stream, cudaError_t status, void* data);
const cudaStream_t cudaStreamLegacy = reinterpret_cast<cudaStream_t>(1);
const cudaStream_t cudaStreamPerThread = reinterpret_cast<cudaStream_t>(2);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest);
inline cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return kf_give(priority, 0); }
cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags);
// The host's function runs before the call returns.
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data);
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned flags);
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaDeviceSynchronize(); }
inline cudaError_t cudaStreamQuery(cudaStream_t) { return cudaDeviceSynchronize(); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaEventCreate(cudaEvent_t* event);
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
inline cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream = nullptr, unsigned = 0) {
  return cudaEventRecord(event, stream);
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaDeviceSynchronize(); }
inline cudaError_t cudaEventQuery(cudaEvent_t) { return cudaDeviceSynchronize(); }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end);

// Functions.
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9,
  cudaFuncAttributeNonPortableClusterSizeAllowed = 14,
};
enum cudaFuncCache {
  cudaFuncCachePreferNone,
  cudaFuncCachePreferShared,
  cudaFuncCachePreferL1,
  cudaFuncCachePreferEqual
};
enum cudaSharedMemConfig {
  cudaSharedMemBankSizeDefault,
  cudaSharedMemBankSizeFourByte,
  cudaSharedMemBankSizeEightByte
};
constexpr int cudaSharedmemCarveoutDefault = -1, cudaSharedmemCarveoutMaxShared = 100, cudaSharedmemCarveoutMaxL1 = 0;
constexpr unsigned cudaOccupancyDefault = 0, cudaOccupancyDisableCachingOverride = 1;
struct cudaFuncAttributes {
  std::size_t sharedSizeBytes;  // 0 until the kernel has run once
  std::size_t constSizeBytes, localSizeBytes;
  int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, cacheModeCA, maxDynamicSharedSizeBytes;
  int preferredShmemCarveout;
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
    constexpr std::size_t kBytes = max_align(sizeof(int), (sizeof(std::size_t) + ... + sizeof(Params)));
    struct Zeros {
      alignas(16) alignas(std::decay_t<Params>...) unsigned char bytes[kBytes];
    };
    [[maybe_unused]] static Zeros zeros;
    kernel(reinterpret_cast<std::decay_t<Params>&>(zeros)...);
  };
  return probe_kernel([](void* context) { (*static_cast<decltype(call)*>(context))(); }, &call);
}

// The same of a kernel's address. Without its type it gets too few arguments, none of which it reads.
inline KernelInfo* kernel_info(const void* kernel) {
  return probe_kernel([](void* context) { reinterpret_cast<void (*)()>(context)(); }, const_cast<void*>(kernel));
}

// The rewriter takes casts to void* off the kernel in calls of these functions.
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int value) {
  return set_attribute(kernel_info(kernel), attribute, value);
}
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel* kernel) {
  return get_attributes(attributes, kernel_info(kernel));
}
template <class Kernel>
cudaError_t cudaFuncSetCacheConfig(Kernel*, cudaFuncCache) {
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetSharedMemConfig(Kernel*, cudaSharedMemConfig) {
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSetCacheConfig(cudaFuncCache) { return cudaSuccess; }
inline cudaError_t cudaDeviceSetSharedMemConfig(cudaSharedMemConfig) { return cudaSuccess; }
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel* kernel, int threads,
                                                          std::size_t shared) {
  return max_active_blocks(blocks, kernel_info(kernel), threads, shared);
}
template <class Kernel>
cudaError_t cudaOccupancyMaxPotentialBlockSize(int* min_grid, int* block, Kernel* kernel, std::size_t shared = 0,
                                               int limit = 0) {
  return max_potential_block_size(min_grid, block, kernel_info(kernel), shared, limit);
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, Kernel* kernel, int threads,
                                                                   std::size_t shared, unsigned) {
  return max_active_blocks(blocks, kernel_info(kernel), threads, shared);
}
// The dynamic shared memory is a function of the threads in a block.
template <class Kernel, class SharedOfThreads>
cudaError_t cudaOccupancyMaxPotentialBlockSizeVariableSMem(int* min_grid, int* block, Kernel* kernel,
                                                           SharedOfThreads shared, int limit = 0) {
  KernelInfo* const info = kernel_info(kernel);
  const int most = info == nullptr ? warpSize : static_cast<int>(info->max_threads);
  int best = 0;
  for (int threads = warpSize; threads <= most && (limit <= 0 || threads <= limit); threads += warpSize) {
    int blocks = 0;
    const auto bytes = static_cast<std::size_t>(shared(threads));
    if (const cudaError_t error = max_active_blocks(&blocks, info, threads, bytes)) return error;
    if (blocks * threads >= best) {
      best = blocks * threads;
      if (const cudaError_t error = max_potential_block_size(min_grid, block, info, bytes, threads)) return error;
    }
  }
  return cudaSuccess;
}

template <class... Params, std::size_t... I>
cudaError_t launch_with(LaunchConfig config, void (*kernel)(Params...), void** arguments, std::index_sequence<I...>) {
  std::tuple<std::decay_t<Params>...> copies(*static_cast<std::decay_t<Params>*>(arguments[I])...);
#ifdef KF_SIMT_PROGRAM
  (kf_pass_to_device(std::get<I>(copies)), ...);
#endif
  auto call = [&] { kernel(std::get<I>(copies)...); };
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
// What the attributes ask for.
void read_attributes(const cudaLaunchConfig_t& config, bool* cooperative, dim3* cluster);
cudaError_t max_active_clusters(int* clusters, KernelInfo* kernel, const cudaLaunchConfig_t& config);
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, Kernel* kernel, const cudaLaunchConfig_t* config) {
  return max_active_clusters(clusters, kernel_info(kernel), *config);
}
template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args&&... args) {
  bool cooperative = false;
  dim3 cluster(0, 0, 0);
  read_attributes(*config, &cooperative, &cluster);
  auto call = [&](auto&... converted) { kernel(converted...); };
  auto bound = [&](std::decay_t<Params>... converted) {
    KernelCall<decltype(call)> launch(call, {"cudaLaunchKernelEx", __FILE__, __LINE__, config->gridDim,
                                             config->blockDim, config->dynamicSmemBytes, cooperative, cluster});
    launch.launch(converted...);
  };
  bound(std::forward<Args>(args)...);
  return cudaPeekAtLastError();
}

inline cudaError_t cudaProfilerStart() { return cudaSuccess; }
inline cudaError_t cudaProfilerStop() { return cudaSuccess; }

}  // namespace kf::simt
