// Memory of the device: allocations, copies, symbols.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>

#include "api.h"

// Where the linker puts the __managed__ variables; null where there are none.
extern "C" {
extern const char __start_kf_managed[] __attribute__((weak, visibility("hidden")));
extern const char __stop_kf_managed[] __attribute__((weak, visibility("hidden")));
}

namespace kf::simt {

namespace {

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
  Allocations& known = lasting<Allocations>();
  const std::lock_guard<std::mutex> lock(known.mutex);
  known.all[static_cast<char*>(fresh)] = {bytes, type, mapped};
  *memory = fresh;
  return report(cudaSuccess);
}

// cudaFree does not take what cudaMallocHost gave, and the other way round.
cudaError_t release(void* memory, bool host) {
  if (memory == nullptr) return report(cudaSuccess);
  const RuntimeCall call(true);
  Allocations& known = lasting<Allocations>();
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
  Allocations& known = lasting<Allocations>();
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

}  // namespace

Allocated allocation_of(const void* address) {
  Allocations& known = lasting<Allocations>();
  const std::lock_guard<std::mutex> lock(known.mutex);
  const auto found = holding(known.all, static_cast<const char*>(address));
  return found == known.all.end() ? Allocated{nullptr, 0} : Allocated{found->first, found->second.bytes};
}

std::size_t memory_total() {
  return static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

cudaError_t cudaMalloc(void** memory, std::size_t bytes) { return allocate(memory, bytes, cudaMemoryTypeDevice); }
cudaError_t cudaMallocManaged(void** memory, std::size_t bytes, unsigned) {
  return allocate(memory, bytes, cudaMemoryTypeManaged);
}
cudaError_t cudaMallocHost(void** memory, std::size_t bytes, unsigned) {
  return allocate(memory, bytes, cudaMemoryTypeHost);
}
cudaError_t cudaFree(void* memory) { return release(memory, false); }
cudaError_t cudaFreeHost(void* memory) { return release(memory, true); }

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
  Allocations& known = lasting<Allocations>();
  const std::lock_guard<std::mutex> lock(known.mutex);
  const bool fresh = known.registered.emplace(static_cast<char*>(memory), Allocation{bytes, cudaMemoryTypeHost}).second;
  return fresh ? cudaSuccess : report(cudaErrorHostMemoryAlreadyRegistered);
}

cudaError_t cudaHostUnregister(void* memory) {
  Allocations& known = lasting<Allocations>();
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
  Allocations& known = lasting<Allocations>();
  const std::lock_guard<std::mutex> lock(known.mutex);
  const char* const address = static_cast<const char*>(memory);
  void* const mutable_memory = const_cast<void*>(memory);
  *attributes = {cudaMemoryTypeUnregistered, -2, nullptr, mutable_memory};
  for (const auto* map : {&known.all, &known.registered, &known.symbols}) {
    const auto found = holding(*map, address);
    if (found == map->end()) continue;
    *attributes = {found->second.type, 0, mutable_memory, mutable_memory};
    if (found->second.type == cudaMemoryTypeDevice) attributes->hostPointer = nullptr;
  }
  if (address >= __start_kf_managed && address < __stop_kf_managed) {
    *attributes = {cudaMemoryTypeManaged, 0, mutable_memory, mutable_memory};
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

// Rows of `width` bytes, `pitch` bytes apart.
cudaError_t cudaMemset2D(void* memory, std::size_t pitch, int value, std::size_t width, std::size_t height) {
  if (width > pitch && height > 1) return report(cudaErrorInvalidValue);
  const RuntimeCall call;
  for (std::size_t row = 0; row < height; ++row) {
    if (const cudaError_t error = set(static_cast<char*>(memory) + row * pitch, value, width)) return error;
  }
  return cudaSuccess;
}

cudaError_t cudaMemset3D(cudaPitchedPtr memory, int value, cudaExtent extent) {
  for (std::size_t z = 0; z < extent.depth; ++z) {
    char* const plane = static_cast<char*>(memory.ptr) + z * memory.ysize * memory.pitch;
    if (const cudaError_t error = cudaMemset2D(plane, memory.pitch, value, extent.width, extent.height)) return error;
  }
  return cudaSuccess;
}

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
  Allocations& known = lasting<Allocations>();
  const std::lock_guard<std::mutex> lock(known.mutex);
  known.symbols[static_cast<char*>(symbol)] = {bytes, cudaMemoryTypeDevice};
}

}  // namespace kf::simt
