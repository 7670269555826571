#include "runtime.h"

#include "kf_simt/runtime_api.h"

#include <time.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>

namespace kf::simt {
namespace {

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t report(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

struct Allocations {
  std::mutex mutex;
  std::map<const char*, std::size_t> sizes;
};

Allocations& allocations() {
  static auto* const instance = new Allocations;
  return *instance;
}

constexpr std::size_t kAlign = 256;

cudaError_t allocate(void** memory, std::size_t bytes) {
  if (memory == nullptr) return report(cudaErrorInvalidValue);
  *memory = nullptr;
  if (bytes == 0) return cudaSuccess;
  void* fresh = nullptr;
  if (bytes > std::size_t{1} << 46 || posix_memalign(&fresh, kAlign, bytes) != 0) {
    return report(cudaErrorMemoryAllocation);
  }
  std::memset(fresh, 0xff, bytes);
  Allocations& all = allocations();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.sizes[static_cast<char*>(fresh)] = bytes;
  *memory = fresh;
  return cudaSuccess;
}

cudaError_t release(void* memory) {
  if (memory == nullptr) return cudaSuccess;
  Allocations& all = allocations();
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (all.sizes.erase(static_cast<char*>(memory)) == 0) return report(cudaErrorInvalidValue);
  }
  std::free(memory);
  return cudaSuccess;
}

// False if the range begins in an allocation and ends outside of it.
bool within(const void* memory, std::size_t bytes) {
  Allocations& all = allocations();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const char* const begin = static_cast<const char*>(memory);
  auto after = all.sizes.upper_bound(begin);
  if (after == all.sizes.begin()) return true;
  --after;
  const auto offset = static_cast<std::size_t>(begin - after->first);
  return offset >= after->second || bytes <= after->second - offset;
}

cudaError_t copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) return report(cudaErrorInvalidMemcpyDirection);
  if (bytes == 0) return cudaSuccess;
  if (to == nullptr || from == nullptr || !within(to, bytes) || !within(from, bytes)) {
    return report(cudaErrorInvalidValue);
  }
  std::memmove(to, from, bytes);
  return cudaSuccess;
}

cudaError_t set(void* memory, int value, std::size_t bytes) {
  if (bytes == 0) return cudaSuccess;
  if (memory == nullptr || !within(memory, bytes)) return report(cudaErrorInvalidValue);
  std::memset(memory, value, bytes);
  return cudaSuccess;
}

std::size_t memory_total() {
  return static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

struct ErrorText {
  cudaError_t error;
  const char *name, *text;
};
constexpr ErrorText kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidSymbol, "cudaErrorInvalidSymbol", "invalid device symbol"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources", "too many resources requested for launch"},
    {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorCooperativeLaunchTooLarge, "cudaErrorCooperativeLaunchTooLarge", "too many blocks in cooperative launch"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

}  // namespace

struct CUstream_st {};
struct CUevent_st {
  bool recorded = false;
  timespec time{};
};

void set_last_error(int cuda_error) { last_error = static_cast<cudaError_t>(cuda_error); }

const char* cudaGetErrorName(cudaError_t error) {
  for (const ErrorText& known : kErrors) {
    if (known.error == error) return known.name;
  }
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  for (const ErrorText& known : kErrors) {
    if (known.error == error) return known.text;
  }
  return "unrecognized error code";
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : report(cudaErrorInvalidDevice); }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device != 0) return report(cudaErrorInvalidDevice);
  cudaDeviceProp p{};
  std::strcpy(p.name, "emulated on the CPU");
  p.totalGlobalMem = memory_total();
  p.sharedMemPerBlock = kStaticLimit;
  p.sharedMemPerBlockOptin = kSharedLimit;
  p.sharedMemPerMultiprocessor = kSharedPerMultiprocessor;
  p.reservedSharedMemPerBlock = 1024;
  p.totalConstMem = 65536;
  p.regsPerBlock = p.regsPerMultiprocessor = 65536;
  p.warpSize = warpSize;
  p.maxThreadsPerBlock = kMaxThreads;
  p.maxThreadsPerMultiProcessor = kThreadsPerMultiprocessor;
  p.maxBlocksPerMultiProcessor = kBlocksPerMultiprocessor;
  p.maxThreadsDim[0] = p.maxThreadsDim[1] = kMaxThreads;
  p.maxThreadsDim[2] = 64;
  p.maxGridSize[0] = 0x7fffffff;
  p.maxGridSize[1] = p.maxGridSize[2] = 65535;
  p.major = 9;
  p.minor = 0;
  p.multiProcessorCount = kMultiprocessors;
  p.l2CacheSize = 32 << 20;
  p.memoryBusWidth = 64;
  p.concurrentKernels = p.cooperativeLaunch = p.integrated = p.managedMemory = 1;
  p.unifiedAddressing = p.canMapHostMemory = 1;
  *properties = p;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  if (const cudaError_t error = cudaGetDeviceProperties(&p, device)) return error;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxBlockDimX: *value = p.maxThreadsDim[0]; break;
    case cudaDevAttrMaxBlockDimY: *value = p.maxThreadsDim[1]; break;
    case cudaDevAttrMaxBlockDimZ: *value = p.maxThreadsDim[2]; break;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *value = p.maxGridSize[1]; break;
    case cudaDevAttrMaxGridDimZ: *value = p.maxGridSize[2]; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = static_cast<int>(p.sharedMemPerBlock); break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = p.regsPerBlock; break;
    case cudaDevAttrClockRate: *value = 1000000; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrMemoryClockRate: *value = 1000000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = p.memoryBusWidth; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = static_cast<int>(p.sharedMemPerMultiprocessor); break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = p.regsPerMultiprocessor; break;
    case cudaDevAttrManagedMemory: *value = 1; break;
    case cudaDevAttrConcurrentManagedAccess: *value = 1; break;
    case cudaDevAttrCooperativeLaunch: *value = 1; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(p.sharedMemPerBlockOptin); break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = p.maxBlocksPerMultiProcessor; break;
    default: return report(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

// As on a GPU, an error of an earlier launch is reported by cudaGetLastError, not here.
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaDeviceReset() { return cudaSuccess; }

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, std::size_t bytes) { return allocate(memory, bytes); }
cudaError_t cudaMallocManaged(void** memory, std::size_t bytes, unsigned) { return allocate(memory, bytes); }
cudaError_t cudaMallocHost(void** memory, std::size_t bytes, unsigned) { return allocate(memory, bytes); }
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) { return allocate(memory, bytes); }
cudaError_t cudaMallocAsync(void** memory, std::size_t bytes, cudaStream_t) { return allocate(memory, bytes); }
cudaError_t cudaFree(void* memory) { return release(memory); }
cudaError_t cudaFreeHost(void* memory) { return release(memory); }
cudaError_t cudaFreeAsync(void* memory, cudaStream_t) { return release(memory); }

cudaError_t cudaMemGetInfo(std::size_t* available, std::size_t* total) {
  *total = memory_total();
  *available = static_cast<std::size_t>(sysconf(_SC_AVPHYS_PAGES)) * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  return copy(to, from, bytes, kind);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  return copy(to, from, bytes, kind);
}

cudaError_t cudaMemcpy2D(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width,
                         std::size_t height, cudaMemcpyKind kind) {
  if (width > to_pitch || width > from_pitch) return report(cudaErrorInvalidValue);
  for (std::size_t row = 0; row < height; ++row) {
    const cudaError_t error =
        copy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width, kind);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t cudaMemset(void* memory, int value, std::size_t bytes) { return set(memory, value, bytes); }

cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t) {
  return set(memory, value, bytes);
}

cudaError_t cudaMemPrefetchAsync(const void*, std::size_t, int, cudaStream_t) { return cudaSuccess; }

cudaError_t copy_symbol(void* to, const void* from, std::size_t bytes, std::size_t symbol_bytes, std::size_t offset) {
  if (offset > symbol_bytes || bytes > symbol_bytes - offset) return report(cudaErrorInvalidValue);
  return copy(to, from, bytes, cudaMemcpyDefault);
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = new CUstream_st;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return cudaStreamCreate(stream); }

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (stream == nullptr) return report(cudaErrorInvalidResourceHandle);
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new CUevent_st;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  if (event == nullptr) return report(cudaErrorInvalidResourceHandle);
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  if (event == nullptr) return report(cudaErrorInvalidResourceHandle);
  clock_gettime(CLOCK_MONOTONIC, &event->time);
  event->recorded = true;
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  if (start == nullptr || end == nullptr || !start->recorded || !end->recorded) {
    return report(cudaErrorInvalidResourceHandle);
  }
  const double seconds = static_cast<double>(end->time.tv_sec - start->time.tv_sec) +
                         1e-9 * static_cast<double>(end->time.tv_nsec - start->time.tv_nsec);
  *milliseconds = static_cast<float>(1e3 * seconds);
  return cudaSuccess;
}

cudaError_t set_attribute(KernelInfo* kernel, cudaFuncAttribute attribute, int value) {
  if (kernel == nullptr) return report(cudaErrorInvalidDeviceFunction);
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || value > static_cast<int>(kSharedLimit) - kernel->static_bytes.load()) {
    return report(cudaErrorInvalidValue);
  }
  kernel->max_dynamic = value;
  return cudaSuccess;
}

cudaError_t get_attributes(cudaFuncAttributes* attributes, KernelInfo* kernel) {
  if (kernel == nullptr) return report(cudaErrorInvalidDeviceFunction);
  *attributes = {};
  attributes->sharedSizeBytes = static_cast<std::size_t>(kernel->static_bytes.load());
  attributes->maxThreadsPerBlock = static_cast<int>(kernel->max_threads);
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  attributes->maxDynamicSharedSizeBytes = kernel->max_dynamic;
  return cudaSuccess;
}

cudaError_t max_active_blocks(int* blocks, KernelInfo* kernel, int threads, std::size_t shared) {
  if (kernel == nullptr) return report(cudaErrorInvalidDeviceFunction);
  if (threads <= 0 || threads > static_cast<int>(kernel->max_threads)) return report(cudaErrorInvalidValue);
  const std::size_t all = shared + static_cast<std::size_t>(kernel->static_bytes.load());
  const bool allowed = shared <= static_cast<std::size_t>(kernel->max_dynamic.load());
  *blocks = allowed ? static_cast<int>(occupancy(static_cast<unsigned>(threads), all)) : 0;
  return cudaSuccess;
}

cudaError_t max_potential_block_size(int* min_grid, int* block, KernelInfo* kernel, std::size_t shared, int limit) {
  if (kernel == nullptr) return report(cudaErrorInvalidDeviceFunction);
  *block = static_cast<int>(kernel->max_threads);
  if (limit > 0 && limit < *block) *block = limit;
  int resident = 0;
  const cudaError_t error = max_active_blocks(&resident, kernel, *block, shared);
  *min_grid = resident * static_cast<int>(kMultiprocessors);
  return error;
}

cudaError_t read_attributes(const cudaLaunchConfig_t& config, bool* cooperative) {
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (attribute.id == cudaLaunchAttributeCooperative) *cooperative = attribute.val.cooperative != 0;
    if (attribute.id == cudaLaunchAttributeClusterDimension) {
      const auto& cluster = attribute.val.clusterDim;
      if (cluster.x * cluster.y * cluster.z != 1) return report(cudaErrorNotSupported);
    }
  }
  return cudaSuccess;
}

}  // namespace kf::simt
