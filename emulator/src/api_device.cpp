// The device as the runtime API shows it: properties, limits, and which kernels fit on it.
#include <cstring>
#include <iterator>

#include "api.h"

namespace kf::simt {

namespace {

std::size_t limits[] = {128 << 10, 1 << 20, 8 << 20, 2, 2048, 128, 0};  // by cudaLimit

}  // namespace

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
#define KF_SIMT_ATTRIBUTE(name, number, member) \
  case name: *value = static_cast<int>(p.member); break;
#include "kf_simt/attributes.h"
    default: return report(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

// As on a GPU, an error of an earlier launch is reported by cudaGetLastError, not here.
cudaError_t cudaDeviceSynchronize() {
  const RuntimeCall call(true);
  return report(cudaSuccess);
}
cudaError_t cudaDeviceReset() {
  const RuntimeCall call(true);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  if (device != 0) return report(cudaErrorInvalidDevice);
  constexpr char kId[] = "0000:00:00.0";
  if (text == nullptr || length < static_cast<int>(sizeof(kId))) return report(cudaErrorInvalidValue);
  std::memcpy(text, kId, sizeof(kId));
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  if (device != 0 || peer != 0) return report(cudaErrorInvalidDevice);
  return kf_give(can, 0);
}

cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr, int device, int peer) {
  if (value == nullptr) return report(cudaErrorInvalidValue);
  if (device != 0 || peer != 0 || device == peer) return report(cudaErrorInvalidDevice);
  return cudaSuccess;
}

// There is no other device.
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return report(cudaErrorInvalidDevice); }
cudaError_t cudaDeviceDisablePeerAccess(int) { return report(cudaErrorInvalidDevice); }

cudaError_t cudaDeviceSetLimit(cudaLimit limit, std::size_t value) {
  if (limit < 0 || limit >= std::size(limits)) return report(cudaErrorUnsupportedLimit);
  limits[limit] = value;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetLimit(std::size_t* value, cudaLimit limit) {
  if (limit < 0 || limit >= std::size(limits)) return report(cudaErrorUnsupportedLimit);
  return kf_give(value, limits[limit]);
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
