#include "runtime.h"

#include "kf_simt/runtime_api.h"

#include <time.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <set>

// Where the linker puts the __managed__ variables; null where there are none.
extern "C" {
extern const char __start_kf_managed[] __attribute__((weak, visibility("hidden")));
extern const char __stop_kf_managed[] __attribute__((weak, visibility("hidden")));
}

namespace kf::simt {
namespace {

thread_local cudaError_t last_error = cudaSuccess;

__thread int runtime_calls = 0;

cudaError_t report(cudaError_t error) {
  if (device_fault != 0) error = static_cast<cudaError_t>(device_fault.load());
  if (error != cudaSuccess) last_error = error;
  return error;
}

// While one lives, this OS thread works for the device, in a call of CUDA's.
class RuntimeCall {
 public:
  explicit RuntimeCall(bool synchronises = false) : synchronises_(synchronises) { ++runtime_calls; }
  ~RuntimeCall() {
    if (--runtime_calls == 0 && program != nullptr) program->close(synchronises_);
  }
  RuntimeCall(const RuntimeCall&) = delete;
  RuntimeCall& operator=(const RuntimeCall&) = delete;
  void open(const void* memory, std::size_t bytes) {
    if (program != nullptr) program->open(memory, bytes);
  }

 private:
  const bool synchronises_;
};

// What a call does that waits for the kernels before it.
cudaError_t synchronise() {
  const RuntimeCall call(true);
  return report(cudaSuccess);
}

struct Allocation {
  std::size_t bytes;
  cudaMemoryType type;
  bool mapped = false;  // by the program's hooks
};

struct Allocations {
  std::mutex mutex;
  std::map<const char*, Allocation> all;
  std::map<const char*, Allocation> registered;  // by cudaHostRegister
  std::map<const char*, Allocation> symbols;     // variables of the device whose addresses the host has asked for
};

Allocations& allocations() {
  static auto* const instance = make_lasting<Allocations>();
  return *instance;
}

constexpr std::size_t kAlign = 256;

cudaError_t allocate(void** memory, std::size_t bytes, cudaMemoryType type) {
  if (memory == nullptr) return report(cudaErrorInvalidValue);
  *memory = nullptr;
  if (bytes == 0 || device_fault != 0) return report(cudaSuccess);
  if (bytes > std::size_t{1} << 46) return report(cudaErrorMemoryAllocation);
  const RuntimeCall call;
  void* fresh = nullptr;
  if (program != nullptr && type != cudaMemoryTypeHost) fresh = program->map(bytes, type == cudaMemoryTypeManaged);
  const bool mapped = fresh != nullptr;
  if (!mapped && posix_memalign(&fresh, kAlign, bytes) != 0) return report(cudaErrorMemoryAllocation);
  std::memset(fresh, 0xff, bytes);
  Allocations& known = allocations();
  const std::lock_guard<std::mutex> lock(known.mutex);
  known.all[static_cast<char*>(fresh)] = {bytes, type, mapped};
  *memory = fresh;
  return report(cudaSuccess);
}

// cudaFree does not take what cudaMallocHost gave, and the other way round.
cudaError_t release(void* memory, bool host) {
  if (memory == nullptr) return report(cudaSuccess);
  const RuntimeCall call(true);
  Allocations& known = allocations();
  bool mapped = false;
  {
    const std::lock_guard<std::mutex> lock(known.mutex);
    const auto found = known.all.find(static_cast<char*>(memory));
    if (found == known.all.end() || (found->second.type == cudaMemoryTypeHost) != host) {
      return report(cudaErrorInvalidValue);
    }
    mapped = found->second.mapped;
    known.all.erase(found);
  }
  if (mapped) {
    program->unmap(memory);
  } else {
    std::free(memory);
  }
  return report(cudaSuccess);
}

// The entry of `map` that holds the address, or its end.
std::map<const char*, Allocation>::const_iterator holding(const std::map<const char*, Allocation>& map,
                                                          const char* address) {
  auto after = map.upper_bound(address);
  if (after == map.begin()) return map.end();
  --after;
  return static_cast<std::size_t>(address - after->first) < after->second.bytes ? after : map.end();
}

// False if the range begins in an allocation and ends outside of it.
bool within(const void* memory, std::size_t bytes) {
  Allocations& known = allocations();
  const std::lock_guard<std::mutex> lock(known.mutex);
  const char* const begin = static_cast<const char*>(memory);
  const auto found = holding(known.all, begin);
  return found == known.all.end() || bytes <= found->second.bytes - static_cast<std::size_t>(begin - found->first);
}

// Whether memory is of this type: cudaMemoryTypeUnregistered is the host's alone, which no kernel reaches. In a library
// nobody knows: its kernels work on the host's memory.
bool is(cudaMemoryType type, const void* memory) {
  if (program == nullptr) return false;
  cudaPointerAttributes attributes;
  cudaPointerGetAttributes(&attributes, memory);
  return attributes.type == type;
}
bool is_hosts(const void* memory) { return is(cudaMemoryTypeUnregistered, memory); }

// What CUDA refuses: memory of the host's where the direction has the device's. The other way round the address says
// where memory is, and the copy is carried out.
bool contradicts(const void* to, const void* from, cudaMemcpyKind kind) {
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  return (to_device && is_hosts(to)) || (from_device && is_hosts(from));
}

cudaError_t copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, bool synchronises = false) {
  if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) return report(cudaErrorInvalidMemcpyDirection);
  if (bytes == 0) return report(cudaSuccess);
  if (to == nullptr || from == nullptr || !within(to, bytes) || !within(from, bytes) || contradicts(to, from, kind)) {
    return report(cudaErrorInvalidValue);
  }
  if (device_fault != 0) return report(cudaSuccess);
  RuntimeCall call(synchronises);
  call.open(to, bytes);
  call.open(from, bytes);
  std::memmove(to, from, bytes);
  if (const bool to_device = is(cudaMemoryTypeDevice, to); to_device != is(cudaMemoryTypeDevice, from)) {
    program->copied(to, bytes, to_device);
  }
  return cudaSuccess;
}

cudaError_t set(void* memory, int value, std::size_t bytes) {
  if (bytes == 0) return report(cudaSuccess);
  if (memory == nullptr || !within(memory, bytes) || is_hosts(memory)) return report(cudaErrorInvalidValue);
  if (device_fault != 0) return report(cudaSuccess);
  RuntimeCall call;
  call.open(memory, bytes);
  std::memset(memory, value, bytes);
  return cudaSuccess;
}

// Rows of `width` bytes, `pitch` bytes apart.
cudaError_t set_rows(void* memory, std::size_t pitch, int value, std::size_t width, std::size_t height) {
  if (width > pitch && height > 1) return report(cudaErrorInvalidValue);
  const RuntimeCall call;
  for (std::size_t row = 0; row < height; ++row) {
    if (const cudaError_t error = set(static_cast<char*>(memory) + row * pitch, value, width)) return error;
  }
  return cudaSuccess;
}

std::size_t limits[] = {128 << 10, 1 << 20, 8 << 20, 2, 2048, 128, 0};  // by cudaLimit
constexpr std::size_t kPitch = 512;                                     // cudaMallocPitch gives multiples of this

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
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorCudartUnloading, "cudaErrorCudartUnloading", "driver shutting down"},
    {cudaErrorInvalidPitchValue, "cudaErrorInvalidPitchValue", "invalid pitch argument"},
    {cudaErrorInvalidDevicePointer, "cudaErrorInvalidDevicePointer", "invalid device pointer"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorMissingConfiguration, "cudaErrorMissingConfiguration", "__global__ function call is not configured"},
    {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice",
     "no kernel image is available for execution on the device"},
    {cudaErrorUnsupportedLimit, "cudaErrorUnsupportedLimit", "limit is not supported on this architecture"},
    {cudaErrorPeerAccessUnsupported, "cudaErrorPeerAccessUnsupported",
     "peer access is not supported between these two devices"},
    {cudaErrorInvalidPtx, "cudaErrorInvalidPtx", "a PTX JIT compilation failed"},
    {cudaErrorSymbolNotFound, "cudaErrorSymbolNotFound", "named symbol not found"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchTimeout, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {cudaErrorPeerAccessNotEnabled, "cudaErrorPeerAccessNotEnabled", "peer access has not been enabled"},
    {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorIllegalInstruction, "cudaErrorIllegalInstruction", "an illegal instruction was encountered"},
    {cudaErrorMisalignedAddress, "cudaErrorMisalignedAddress", "misaligned address"},
    {cudaErrorInvalidAddressSpace, "cudaErrorInvalidAddressSpace",
     "operation not supported on global/shared address space"},
    {cudaErrorInvalidPc, "cudaErrorInvalidPc", "invalid program counter"},
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
    {cudaErrorInvalidClusterSize, "cudaErrorInvalidClusterSize", "invalid cluster size"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

}  // namespace

struct CUstream_st {
  unsigned flags;
};
struct CUevent_st {
  bool recorded = false;
  timespec time{};
};

namespace {

// All that the program has made and not destroyed: still known, and so no leak to a sanitizer, when it ends.
template <class T>
class Handles {
 public:
  static T* make(T value) {
    T* const made = new T(value);
    Handles& all = instance();
    const std::lock_guard<std::mutex> lock(all.mutex_);
    all.made_.insert(made);
    return made;
  }
  static cudaError_t destroy(T* handle) {
    Handles& all = instance();
    const std::lock_guard<std::mutex> lock(all.mutex_);
    if (all.made_.erase(handle) == 0) return report(cudaErrorInvalidResourceHandle);
    delete handle;
    return report(cudaSuccess);
  }

 private:
  static Handles& instance() {
    static auto* const handles = make_lasting<Handles>();
    return *handles;
  }
  std::mutex mutex_;
  std::set<T*> made_;
};

// The streams that no program makes: the default one, cudaStreamLegacy and cudaStreamPerThread.
bool is_named(cudaStream_t stream) {
  return stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
}

}  // namespace

std::atomic<int> device_fault{0};
const Program* program = nullptr;
bool in_runtime_call() { return runtime_calls != 0; }

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
  p.concurrentManagedAccess = p.hostRegisterSupported = p.hostNativeAtomicSupported = 1;
  p.unifiedAddressing = p.canMapHostMemory = p.globalL1CacheSupported = p.localL1CacheSupported = 1;
  p.streamPrioritiesSupported = p.canUseHostPointerForRegisteredMem = p.asyncEngineCount = p.deviceOverlap = 1;
  p.memPitch = 0x7fffffff;
  p.textureAlignment = p.surfaceAlignment = kPitch;
  p.texturePitchAlignment = 32;
  p.clockRate = p.memoryClockRate = 1000000;  // kHz, as clock64() counts; programs divide by the other, too
  p.singleToDoublePrecisionPerfRatio = 2;
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
    case cudaDevAttrClockRate: *value = p.clockRate; break;
    case cudaDevAttrTotalConstantMemory: *value = static_cast<int>(p.totalConstMem); break;
    case cudaDevAttrMaxPitch: *value = static_cast<int>(p.memPitch); break;
    case cudaDevAttrTextureAlignment: *value = static_cast<int>(p.textureAlignment); break;
    case cudaDevAttrGpuOverlap: *value = p.deviceOverlap; break;
    case cudaDevAttrKernelExecTimeout: *value = p.kernelExecTimeoutEnabled; break;
    case cudaDevAttrIntegrated: *value = p.integrated; break;
    case cudaDevAttrCanMapHostMemory: *value = p.canMapHostMemory; break;
    case cudaDevAttrComputeMode: *value = p.computeMode; break;
    case cudaDevAttrConcurrentKernels: *value = p.concurrentKernels; break;
    case cudaDevAttrEccEnabled: *value = p.ECCEnabled; break;
    case cudaDevAttrPciBusId: *value = p.pciBusID; break;
    case cudaDevAttrPciDeviceId: *value = p.pciDeviceID; break;
    case cudaDevAttrPciDomainId: *value = p.pciDomainID; break;
    case cudaDevAttrTccDriver: *value = p.tccDriver; break;
    case cudaDevAttrAsyncEngineCount: *value = p.asyncEngineCount; break;
    case cudaDevAttrUnifiedAddressing: *value = p.unifiedAddressing; break;
    case cudaDevAttrStreamPrioritiesSupported: *value = p.streamPrioritiesSupported; break;
    case cudaDevAttrGlobalL1CacheSupported: *value = p.globalL1CacheSupported; break;
    case cudaDevAttrLocalL1CacheSupported: *value = p.localL1CacheSupported; break;
    case cudaDevAttrIsMultiGpuBoard: *value = p.isMultiGpuBoard; break;
    case cudaDevAttrHostNativeAtomicSupported: *value = p.hostNativeAtomicSupported; break;
    case cudaDevAttrSingleToDoublePrecisionPerfRatio: *value = p.singleToDoublePrecisionPerfRatio; break;
    case cudaDevAttrPageableMemoryAccess: *value = p.pageableMemoryAccess; break;
    case cudaDevAttrComputePreemptionSupported: *value = p.computePreemptionSupported; break;
    case cudaDevAttrCanUseHostPointerForRegisteredMem: *value = p.canUseHostPointerForRegisteredMem; break;
    case cudaDevAttrHostRegisterSupported: *value = p.hostRegisterSupported; break;
    case cudaDevAttrPageableMemoryAccessUsesHostPageTables: *value = p.pageableMemoryAccessUsesHostPageTables; break;
    case cudaDevAttrDirectManagedMemAccessFromHost: *value = p.directManagedMemAccessFromHost; break;
    case cudaDevAttrMaxPersistingL2CacheSize: *value = p.persistingL2CacheMaxSize; break;
    case cudaDevAttrMaxAccessPolicyWindowSize: *value = p.accessPolicyMaxWindowSize; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = static_cast<int>(p.reservedSharedMemPerBlock); break;
    case cudaDevAttrMemoryPoolsSupported: *value = p.memoryPoolsSupported; break;
    case cudaDevAttrGPUDirectRDMASupported: *value = p.gpuDirectRDMASupported; break;
    case cudaDevAttrClusterLaunch: *value = p.clusterLaunch; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrMemoryClockRate: *value = p.memoryClockRate; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = p.memoryBusWidth; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = static_cast<int>(p.sharedMemPerMultiprocessor); break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = p.regsPerMultiprocessor; break;
    case cudaDevAttrManagedMemory: *value = p.managedMemory; break;
    case cudaDevAttrConcurrentManagedAccess: *value = p.concurrentManagedAccess; break;
    case cudaDevAttrCooperativeLaunch: *value = p.cooperativeLaunch; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(p.sharedMemPerBlockOptin); break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = p.maxBlocksPerMultiProcessor; break;
    default: return report(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

// As on a GPU, an error of an earlier launch is reported by cudaGetLastError, not here.
cudaError_t cudaDeviceSynchronize() { return synchronise(); }
cudaError_t cudaDeviceReset() {
  const RuntimeCall call(true);
  return cudaSuccess;
}

cudaError_t cudaChooseDevice(int* device, const cudaDeviceProp*) { return cudaGetDevice(device); }

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  if (device != 0) return report(cudaErrorInvalidDevice);
  constexpr char kId[] = "0000:00:00.0";
  if (text == nullptr || length < static_cast<int>(sizeof(kId))) return report(cudaErrorInvalidValue);
  std::memcpy(text, kId, sizeof(kId));
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  if (device != 0 || peer != 0) return report(cudaErrorInvalidDevice);
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr, int device, int peer) {
  if (value == nullptr) return report(cudaErrorInvalidValue);
  if (device != 0 || peer != 0 || device == peer) return report(cudaErrorInvalidDevice);
  return cudaSuccess;
}

// There is no other device.
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return report(cudaErrorInvalidDevice); }
cudaError_t cudaDeviceDisablePeerAccess(int) { return report(cudaErrorInvalidDevice); }

cudaError_t cudaSetDeviceFlags(unsigned) { return cudaSuccess; }
cudaError_t cudaGetDeviceFlags(unsigned* flags) {
  *flags = cudaDeviceMapHost;
  return cudaSuccess;
}
cudaError_t cudaInitDevice(int device, unsigned, unsigned) { return cudaSetDevice(device); }

cudaError_t cudaDeviceSetLimit(cudaLimit limit, std::size_t value) {
  if (limit < 0 || limit >= std::size(limits)) return report(cudaErrorUnsupportedLimit);
  limits[limit] = value;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetLimit(std::size_t* value, cudaLimit limit) {
  if (limit < 0 || limit >= std::size(limits)) return report(cudaErrorUnsupportedLimit);
  *value = limits[limit];
  return cudaSuccess;
}

cudaError_t cudaCtxResetPersistingL2Cache() { return cudaSuccess; }

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, std::size_t bytes) { return allocate(memory, bytes, cudaMemoryTypeDevice); }
cudaError_t cudaMallocAsync(void** memory, std::size_t bytes, cudaStream_t) { return cudaMalloc(memory, bytes); }
cudaError_t cudaMallocManaged(void** memory, std::size_t bytes, unsigned) {
  return allocate(memory, bytes, cudaMemoryTypeManaged);
}
cudaError_t cudaMallocHost(void** memory, std::size_t bytes, unsigned) {
  return allocate(memory, bytes, cudaMemoryTypeHost);
}
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned flags) {
  return cudaMallocHost(memory, bytes, flags);
}
cudaError_t cudaFree(void* memory) { return release(memory, false); }
cudaError_t cudaFreeHost(void* memory) { return release(memory, true); }
cudaError_t cudaFreeAsync(void* memory, cudaStream_t) { return release(memory, false); }

cudaError_t cudaMallocPitch(void** memory, std::size_t* pitch, std::size_t width, std::size_t height) {
  *pitch = (width + kPitch - 1) / kPitch * kPitch;
  return cudaMalloc(memory, *pitch * height);
}

cudaError_t cudaMalloc3D(cudaPitchedPtr* memory, cudaExtent extent) {
  memory->xsize = extent.width;
  memory->ysize = extent.height;
  return cudaMallocPitch(&memory->ptr, &memory->pitch, extent.width, extent.height * extent.depth);
}

cudaError_t cudaHostRegister(void* memory, std::size_t bytes, unsigned) {
  if (memory == nullptr || bytes == 0) return report(cudaErrorInvalidValue);
  Allocations& known = allocations();
  const std::lock_guard<std::mutex> lock(known.mutex);
  const bool fresh = known.registered.emplace(static_cast<char*>(memory), Allocation{bytes, cudaMemoryTypeHost}).second;
  return fresh ? cudaSuccess : report(cudaErrorHostMemoryAlreadyRegistered);
}

cudaError_t cudaHostUnregister(void* memory) {
  Allocations& known = allocations();
  const std::lock_guard<std::mutex> lock(known.mutex);
  return known.registered.erase(static_cast<char*>(memory)) ? cudaSuccess : report(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaHostGetDevicePointer(void** device_memory, void* memory, unsigned) {
  cudaPointerAttributes attributes;
  cudaPointerGetAttributes(&attributes, memory);
  if (attributes.type != cudaMemoryTypeHost) return report(cudaErrorInvalidValue);
  *device_memory = memory;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* memory) {
  Allocations& known = allocations();
  const std::lock_guard<std::mutex> lock(known.mutex);
  const char* const address = static_cast<const char*>(memory);
  *attributes = {cudaMemoryTypeUnregistered, -2, nullptr, const_cast<void*>(memory)};
  for (const auto* map : {&known.all, &known.registered, &known.symbols}) {
    const auto found = holding(*map, address);
    if (found == map->end()) continue;
    void* const mutable_memory = const_cast<void*>(memory);
    *attributes = {found->second.type, 0, mutable_memory, mutable_memory};
    if (found->second.type == cudaMemoryTypeDevice) attributes->hostPointer = nullptr;
  }
  if (address >= __start_kf_managed && address < __stop_kf_managed) {
    *attributes = {cudaMemoryTypeManaged, 0, const_cast<void*>(memory), const_cast<void*>(memory)};
  }
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(std::size_t* available, std::size_t* total) {
  *total = memory_total();
  *available = static_cast<std::size_t>(sysconf(_SC_AVPHYS_PAGES)) * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  return copy(to, from, bytes, kind, true);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  return copy(to, from, bytes, kind);
}

cudaError_t cudaMemcpy2D(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width,
                         std::size_t height, cudaMemcpyKind kind) {
  const RuntimeCall call(true);
  return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, nullptr);
}

cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                              std::size_t width, std::size_t height, cudaMemcpyKind kind, cudaStream_t) {
  if (width > to_pitch || width > from_pitch) return report(cudaErrorInvalidValue);
  const RuntimeCall call;
  for (std::size_t row = 0; row < height; ++row) {
    const cudaError_t error =
        copy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width, kind);
    if (error != cudaSuccess) return error;
  }
  return report(cudaSuccess);
}

cudaError_t cudaMemcpy3D(const cudaMemcpy3DParms* parameters) {
  const RuntimeCall call(true);
  return cudaMemcpy3DAsync(parameters, nullptr);
}

cudaError_t cudaMemcpy3DAsync(const cudaMemcpy3DParms* p, cudaStream_t stream) {
  const RuntimeCall call;
  for (std::size_t z = 0; z < p->extent.depth; ++z) {
    const auto plane = [&](const cudaPitchedPtr& memory, const cudaPos& pos) {
      return static_cast<char*>(memory.ptr) + ((pos.z + z) * memory.ysize + pos.y) * memory.pitch + pos.x;
    };
    const cudaError_t error =
        cudaMemcpy2DAsync(plane(p->dstPtr, p->dstPos), p->dstPtr.pitch, plane(p->srcPtr, p->srcPos), p->srcPtr.pitch,
                          p->extent.width, p->extent.height, p->kind, stream);
    if (error != cudaSuccess) return error;
  }
  return report(cudaSuccess);
}

cudaError_t cudaMemcpyPeer(void* to, int to_device, const void* from, int from_device, std::size_t bytes) {
  if (to_device != 0 || from_device != 0) return report(cudaErrorInvalidDevice);
  return copy(to, from, bytes, cudaMemcpyDeviceToDevice, true);
}

cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, std::size_t bytes,
                                cudaStream_t) {
  if (to_device != 0 || from_device != 0) return report(cudaErrorInvalidDevice);
  return copy(to, from, bytes, cudaMemcpyDeviceToDevice);
}

cudaError_t cudaMemset(void* memory, int value, std::size_t bytes) { return set(memory, value, bytes); }

cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t) {
  return set(memory, value, bytes);
}

cudaError_t cudaMemset2D(void* memory, std::size_t pitch, int value, std::size_t width, std::size_t height) {
  return set_rows(memory, pitch, value, width, height);
}

cudaError_t cudaMemset2DAsync(void* memory, std::size_t pitch, int value, std::size_t width, std::size_t height,
                              cudaStream_t) {
  return set_rows(memory, pitch, value, width, height);
}

cudaError_t cudaMemset3D(cudaPitchedPtr memory, int value, cudaExtent extent) {
  for (std::size_t z = 0; z < extent.depth; ++z) {
    char* const plane = static_cast<char*>(memory.ptr) + z * memory.ysize * memory.pitch;
    if (const cudaError_t error = set_rows(plane, memory.pitch, value, extent.width, extent.height)) return error;
  }
  return cudaSuccess;
}

cudaError_t cudaMemPrefetchAsync(const void*, std::size_t, int, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaMemPrefetchAsync(const void*, std::size_t, cudaMemLocation, unsigned, cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaMemAdvise(const void*, std::size_t, cudaMemoryAdvise, int) { return cudaSuccess; }
cudaError_t cudaMemAdvise(const void*, std::size_t, cudaMemoryAdvise, cudaMemLocation) { return cudaSuccess; }
cudaError_t cudaStreamAttachMemAsync(cudaStream_t, void*, std::size_t, unsigned) { return cudaSuccess; }

cudaError_t copy_symbol(void* symbol, std::size_t symbol_bytes, std::size_t offset, void* to, const void* from,
                        std::size_t bytes, cudaMemcpyKind kind, bool synchronises) {
  // The variable itself is on the device, whatever the address says.
  const bool backwards = to == nullptr ? kind == cudaMemcpyDeviceToHost : kind == cudaMemcpyHostToDevice;
  if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault || kind == cudaMemcpyHostToHost || backwards) {
    return report(cudaErrorInvalidMemcpyDirection);
  }
  if (offset > symbol_bytes || bytes > symbol_bytes - offset) return report(cudaErrorInvalidValue);
  char* const place = static_cast<char*>(symbol) + offset;
  note_symbol(symbol, symbol_bytes);
  return to == nullptr ? copy(place, from, bytes, kind, synchronises) : copy(to, place, bytes, kind, synchronises);
}

void note_symbol(void* symbol, std::size_t bytes) {
  Allocations& known = allocations();
  const std::lock_guard<std::mutex> lock(known.mutex);
  known.symbols[static_cast<char*>(symbol)] = {bytes, cudaMemoryTypeDevice};
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  *stream = Handles<CUstream_st>::make({flags});
  return report(cudaSuccess);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  *flags = is_named(stream) ? cudaStreamDefault : stream->flags;
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  if (const cudaError_t error = synchronise()) return error;  // the stream has come to it
  function(data);
  return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned) {
  callback(stream, synchronise(), data);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) { return Handles<CUstream_st>::destroy(stream); }

cudaError_t cudaStreamSynchronize(cudaStream_t) { return synchronise(); }
cudaError_t cudaStreamQuery(cudaStream_t) { return synchronise(); }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return report(cudaSuccess); }

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = Handles<CUevent_st>::make({});
  return report(cudaSuccess);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }

cudaError_t cudaEventDestroy(cudaEvent_t event) { return Handles<CUevent_st>::destroy(event); }

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  if (event == nullptr) return report(cudaErrorInvalidResourceHandle);
  clock_gettime(CLOCK_MONOTONIC, &event->time);
  event->recorded = true;
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

cudaError_t cudaEventSynchronize(cudaEvent_t) { return synchronise(); }
cudaError_t cudaEventQuery(cudaEvent_t) { return synchronise(); }

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
  if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed) kernel->large_cluster = value != 0;
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

// As if clusters could lie on any multiprocessors; those of a GPU lie within a group of them, where some may be left
// over.
cudaError_t max_active_clusters(int* clusters, KernelInfo* kernel, const cudaLaunchConfig_t& config) {
  bool cooperative = false;
  dim3 cluster(1, 1, 1);
  read_attributes(config, &cooperative, &cluster);
  const dim3 block = config.blockDim;
  int blocks = 0;
  const cudaError_t error =
      max_active_blocks(&blocks, kernel, static_cast<int>(block.x * block.y * block.z), config.dynamicSmemBytes);
  *clusters = blocks * static_cast<int>(kMultiprocessors) / static_cast<int>(cluster.x * cluster.y * cluster.z);
  return error;
}

void read_attributes(const cudaLaunchConfig_t& config, bool* cooperative, dim3* cluster) {
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (attribute.id == cudaLaunchAttributeCooperative) *cooperative = attribute.val.cooperative != 0;
    if (attribute.id == cudaLaunchAttributeClusterDimension) {
      const auto& dim = attribute.val.clusterDim;
      *cluster = dim3(dim.x, dim.y, dim.z);
    }
  }
}

}  // namespace kf::simt
