// What stays between the instructions of inline PTX: copies under way, mbarriers; and tensor maps. The copying itself
// is in kf_simt/ptx_async.h, where sanitizers see it.
#include <time.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <deque>
#include <unordered_map>

#include "scheduler.h"
// The others see the indices as runtime.h does.
#include "cuda.h"
#include "kf_simt/ptx.h"

namespace kf::simt::ptx {

void failure(CallSite site, const char* format, ...) {
  char text[400];
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  kernel_error(text, site);
}

// ---- special registers ----

namespace {
std::uint64_t block_number() {
  return blockIdx.x + std::uint64_t{gridDim.x} * (blockIdx.y + std::uint64_t{gridDim.y} * blockIdx.z);
}
}  // namespace

unsigned sm_count() { return kMultiprocessors; }
unsigned sm_id() { return static_cast<unsigned>(block_number() % kMultiprocessors); }
std::uint64_t grid_id() { return launch_count(); }
unsigned dynamic_shared_bytes() {
  Worker* const worker = Worker::in_kernel();
  return worker == nullptr ? 0 : static_cast<unsigned>(worker->launch().config.shared);
}
std::uint64_t global_timer() {
  timespec t{};
  clock_gettime(CLOCK_REALTIME, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1000000000u + static_cast<std::uint64_t>(t.tv_nsec);
}

// ---- registers of 128 bits ----

namespace {
std::atomic_flag wide_locks[64];
std::atomic_flag& wide_lock(const void* address) {
  return wide_locks[reinterpret_cast<std::uintptr_t>(address) / sizeof(Bits128) % 64];
}
}  // namespace

KF_SIMT_UNINSTRUMENTED Bits128 load_wide(const void* address) {
  const SpinLock lock(wide_lock(address));
  Bits128 value;
  std::memcpy(&value, address, sizeof(value));
  return value;
}
KF_SIMT_UNINSTRUMENTED void store_wide(void* address, Bits128 value) {
  const SpinLock lock(wide_lock(address));
  std::memcpy(address, &value, sizeof(value));
}

// ---- the copies of each thread ----

namespace {

// First in, first out, with the number of the group that each belongs to.
template <class T>
class Groups {
 public:
  void add(const T& item) { items_.push_back({item, open_}); }
  void close() { ++open_; }
  bool next(unsigned keep, T& item) {
    if (items_.empty()) return false;
    if (keep != kAll && items_.front().group + keep >= open_) return false;
    item = items_.front().item;
    items_.pop_front();
    return true;
  }

 private:
  struct Item {
    T item;
    std::uint64_t group;
  };
  std::deque<Item> items_;
  std::uint64_t open_ = 0;
};

struct ThreadState {
  std::uint64_t block = 0;  // which of the blocks that this OS thread has run
  std::uint64_t decisions = 0;
  std::uint64_t products = 0;  // groups of products that it has closed
  std::unique_ptr<Groups<Copy>> copies;
  std::unique_ptr<Groups<Transfer>> stores;
};

// The state of the running thread. What an earlier block never waited for is gone.
ThreadState& mine() {
  const race::Quiet quiet;
  static thread_local std::vector<ThreadState> threads(kMaxThreads);
  ThreadState& state = threads[thread_index()];
  const std::uint64_t block = running("inline PTX").blocks_run();
  if (state.block != block) {
    state.block = block;
    state.decisions = state.products = 0;
    state.copies.reset();
    state.stores.reset();
  }
  return state;
}

template <class T>
Groups<T>& made(std::unique_ptr<Groups<T>>& groups) {
  if (!groups) groups = std::make_unique<Groups<T>>();
  return *groups;
}

}  // namespace

void note_copy(const Copy& copy) {
  const race::Quiet quiet;
  made(mine().copies).add(copy);
}
void close_copies() {
  const race::Quiet quiet;
  made(mine().copies).close();
}
bool next_copy(unsigned keep, Copy& copy) {
  const race::Quiet quiet;
  return made(mine().copies).next(keep, copy);
}
void note_store(const Transfer& store) {
  const race::Quiet quiet;
  made(mine().stores).add(store);
}
void close_stores() {
  const race::Quiet quiet;
  made(mine().stores).close();
}
bool next_store(unsigned keep, Transfer& store) {
  const race::Quiet quiet;
  return made(mine().stores).next(keep, store);
}

bool happens_now() {
  const Schedule& schedule = running("inline PTX").launch().settings.schedule;
  if (schedule.kind != Schedule::kRandom) return false;
  const race::Quiet quiet;
  std::uint64_t z = schedule.seed * 0x9e3779b97f4a7c15ULL + block_number() * kMaxThreads + thread_index();
  z = (z + ++mine().decisions) * 0xbf58476d1ce4e5b9ULL;
  return (z ^ z >> 31) * 0x94d049bb133111ebULL >> 63 != 0;
}

// ---- warpgroups ----

namespace {

// Groups of products that the lanes of each warp have closed: each lane counts, since it has read a part of the tiles.
struct Warps {
  std::uint64_t block = 0;
  std::uint64_t closed[kMaxWarps];
};
Warps& warps_of_block() {
  static thread_local Warps warps;
  const std::uint64_t block = running("inline PTX").blocks_run();
  if (warps.block != block) {
    warps.block = block;
    std::fill(std::begin(warps.closed), std::end(warps.closed), 0);
  }
  return warps;
}

// What orders the threads of this warp with those that wait for it: an address within the block's shared memory, where
// orders begin anew with each block, and odd, where no mbarrier lies.
const void* order_of(unsigned warp) { return static_cast<char*>(dynamic_shared_address()) + 2 * warp + 1; }

}  // namespace

void warpgroup_commit() {
  order_release(order_of(warp_id()));
  ++mine().products;
  ++warps_of_block().closed[warp_id()];
  note_change();
}

void warpgroup_wait(unsigned keep) {
  Warps& warps = warps_of_block();
  const std::uint64_t groups = mine().products;
  for (unsigned w = warp_id() / 4 * 4; w < warp_id() / 4 * 4 + 4; ++w) {
    while (warps.closed[w] / warpSize + keep < groups) poll_yield();
    order_acquire(order_of(w));
  }
}

// ---- transfers that mbarriers wait for ----

namespace {

// By the address of the mbarrier. A thread that holds the lock is not interrupted.
struct Transfers {
  std::mutex mutex;
  std::unordered_map<const void*, std::deque<Transfer>> waiting;
};

template <class Work>
void with_transfers(Work work) {
  const race::Quiet quiet;
  running("inline PTX").undisturbed([&] {
    Transfers& all = lasting<Transfers>();
    const std::lock_guard<std::mutex> lock(all.mutex);
    work(all.waiting);
  });
}

}  // namespace

void note_transfer(const void* barrier, const Transfer& transfer) {
  with_transfers([&](auto& waiting) { waiting[barrier].push_back(transfer); });
}

bool next_transfer(const void* barrier, Transfer& transfer) {
  bool found = false;
  with_transfers([&](auto& waiting) {
    const auto entry = waiting.find(barrier);
    if (entry == waiting.end()) return;
    found = true;
    transfer = entry->second.front();
    entry->second.pop_front();
    if (entry->second.empty()) waiting.erase(entry);
  });
  return found;
}

void forget_transfers(const void* barrier) {
  with_transfers([&](auto& waiting) { waiting.erase(barrier); });
}

void hand_over_copies(const void* barrier) {
  Transfer transfer{Transfer::kCopy};
  while (next_copy(kAll, transfer.copy)) note_transfer(barrier, transfer);
}

// ---- mbarriers ----

namespace {

struct State {
  unsigned pending, count, phase;
  std::int64_t bytes;

  explicit State(std::uint64_t word)
      : pending(static_cast<unsigned>(word) & kBarrierLimit),
        count(static_cast<unsigned>(word >> 20) & kBarrierLimit),
        phase(static_cast<unsigned>(word >> 61) & 1),
        bytes(static_cast<std::int64_t>(word << 3) >> 43) {}
  std::uint64_t word() const {
    return kBarrierMark | std::uint64_t{phase} << 61 | (static_cast<std::uint64_t>(bytes) & 0x1fffff) << 40 |
           std::uint64_t{count} << 20 | pending;
  }
};

std::uint64_t load_barrier(const void* address, CallSite site) {
  const std::uint64_t word = __atomic_load_n(static_cast<const std::uint64_t*>(address), __ATOMIC_ACQUIRE);
  if ((word & std::uint64_t{3} << 62) != kBarrierMark) failure(site, "uses an mbarrier that is not initialised");
  return word;
}

}  // namespace

std::uint64_t change_barrier(void* address, const BarrierChange& change, CallSite site) {
  check_aligned(address, 8, "an mbarrier", site);
  std::uint64_t word = load_barrier(address, site);
  for (;;) {
    State state(word);
    state.pending += change.expect;
    if (change.drop) {
      if (state.count < change.arrive) failure(site, "drops out of an mbarrier that expects nobody any more");
      state.count -= change.arrive;
    }
    state.bytes += change.bytes;
    if (state.bytes > kBarrierLimit || state.bytes < -std::int64_t{kBarrierLimit}) {
      failure(site, "lets an mbarrier expect more than 1048575 bytes in one phase");
    }
    if (state.pending < change.arrive || (state.pending == 0 && change.arrive != 0)) {
      failure(site, "arrives at an mbarrier that expects %u more in this phase (%u in all)", State(word).pending,
              state.count);
    }
    state.pending -= change.arrive;
    if (state.pending == 0 && state.bytes == 0) {
      state.pending = state.count;
      state.phase ^= 1;
    }
    auto* const to = static_cast<std::uint64_t*>(address);
    if (__atomic_compare_exchange_n(to, &word, state.word(), false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) break;
  }
  note_change();
  return word;
}

unsigned barrier_phase(const void* address, CallSite site) {
  check_aligned(address, 8, "an mbarrier", site);
  return State(load_barrier(address, site)).phase;
}

// ---- tensor maps ----

TensorMap tensor_map_at(const void* address, int rank, CallSite site) {
  check_aligned(address, 64, "a tensor map", site);
  TensorMap map;
  note_read(address, sizeof(map));
  std::memcpy(static_cast<void*>(&map), address, sizeof(map));
  if (map.magic != TensorMap::kMagic)
    failure(site, "a TMA copy with a tensor map that cuTensorMapEncodeTiled did not make");
  if (map.rank != rank) failure(site, "a TMA copy in %d dimensions with a tensor map of %d", rank, map.rank);
  const unsigned span = 16u << map.swizzle;
  if (map.swizzle != TensorMap::kNone && map.row_bytes() != span) {
    // Where the rows of such a box lie is not documented.
    failure(site,
            "a TMA copy with a box of %u bytes in the innermost dimension and a swizzle of %u bytes: the emulation "
            "wants them equal",
            map.row_bytes(), span);
  }
  return map;
}

}  // namespace kf::simt::ptx

namespace kf::simt {

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* size, const cuuint64_t* stride, const cuuint32_t* box,
                                const cuuint32_t* step, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  const auto multiple = [](const void* pointer, unsigned of) {
    return reinterpret_cast<std::uintptr_t>(pointer) % of == 0;
  };
  const bool arguments = map != nullptr && address != nullptr && size != nullptr && box != nullptr && step != nullptr;
  // The driver refuses a null array of strides also for one dimension, where it would read none of them.
  if (!arguments || rank < 1 || rank > 5 || stride == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!multiple(map, 64) || !multiple(address, 16)) return CUDA_ERROR_INVALID_VALUE;
  if (type < CU_TENSOR_MAP_DATA_TYPE_UINT8 || type > CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ ||
      swizzle < CU_TENSOR_MAP_SWIZZLE_NONE || swizzle > CU_TENSOR_MAP_SWIZZLE_128B ||
      promotion < CU_TENSOR_MAP_L2_PROMOTION_NONE || promotion > CU_TENSOR_MAP_L2_PROMOTION_L2_256B ||
      interleave < CU_TENSOR_MAP_INTERLEAVE_NONE || interleave > CU_TENSOR_MAP_INTERLEAVE_32B ||
      fill < CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE || fill > CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE && type < CU_TENSOR_MAP_DATA_TYPE_FLOAT16) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE) {
    return rank < 3 ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_NOT_SUPPORTED;
  }

  TensorMap made{};
  made.magic = TensorMap::kMagic;
  made.type = static_cast<TensorMap::Type>(type);
  made.rank = static_cast<std::uint8_t>(rank);
  made.swizzle = static_cast<TensorMap::Swizzle>(swizzle);
  made.fill_nan = fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
  made.address = reinterpret_cast<std::uint64_t>(address);
  for (unsigned d = 0; d < 5; ++d) {
    made.size[d] = 1;
    made.box[d] = made.step[d] = 1;
  }
  for (unsigned d = 0; d < rank; ++d) {
    if (size[d] == 0 || size[d] > std::uint64_t{1} << 32) return CUDA_ERROR_INVALID_VALUE;
    if (box[d] == 0 || box[d] > 256 || step[d] == 0 || step[d] > 8) return CUDA_ERROR_INVALID_VALUE;
    made.size[d] = size[d];
    made.box[d] = static_cast<std::uint16_t>(box[d]);
    made.step[d] = d == 0 ? std::uint8_t{1} : static_cast<std::uint8_t>(step[d]);  // the innermost one is ignored
    if (d == 0) continue;
    if (stride[d - 1] % 16 != 0 || stride[d - 1] >= std::uint64_t{1} << 40) return CUDA_ERROR_INVALID_VALUE;
    made.stride[d - 1] = stride[d - 1];
  }
  if (made.row_bytes() % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  if (made.swizzle != TensorMap::kNone && made.row_bytes() > 16u << made.swizzle) return CUDA_ERROR_INVALID_VALUE;
  std::memset(static_cast<void*>(map), 0, sizeof(*map));
  std::memcpy(static_cast<void*>(map), &made, sizeof(made));
  return CUDA_SUCCESS;
}

CUresult cuTensorMapReplaceAddress(CUtensorMap* map, void* address) {
  TensorMap made;
  if (map == nullptr || reinterpret_cast<std::uintptr_t>(address) % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(static_cast<void*>(&made), map, sizeof(made));
  if (made.magic != TensorMap::kMagic) return CUDA_ERROR_INVALID_VALUE;
  made.address = reinterpret_cast<std::uint64_t>(address);
  std::memcpy(static_cast<void*>(map), &made, sizeof(made));
  return CUDA_SUCCESS;
}

namespace {
struct ErrorText {
  CUresult error;
  const char *name, *text;
};
constexpr ErrorText kErrors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

CUresult find_text(CUresult error, const char* ErrorText::* member, const char** text) {
  *text = nullptr;
  for (const ErrorText& known : kErrors) {
    if (known.error == error) *text = known.*member;
  }
  return *text != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
}  // namespace

CUresult cuGetErrorName(CUresult error, const char** name) { return find_text(error, &ErrorText::name, name); }
CUresult cuGetErrorString(CUresult error, const char** text) { return find_text(error, &ErrorText::text, text); }

cudaError_t find_driver_function(const char* name, void** function, cudaDriverEntryPointQueryResult* result) {
  struct Function {
    const char* name;
    void* address;
  };
  static const Function functions[] = {
      {"cuTensorMapEncodeTiled", reinterpret_cast<void*>(&cuTensorMapEncodeTiled)},
      {"cuTensorMapReplaceAddress", reinterpret_cast<void*>(&cuTensorMapReplaceAddress)},
      {"cuGetErrorName", reinterpret_cast<void*>(&cuGetErrorName)},
      {"cuGetErrorString", reinterpret_cast<void*>(&cuGetErrorString)},
  };
  if (name == nullptr || function == nullptr) return cudaErrorInvalidValue;
  *function = nullptr;
  for (const Function& known : functions) {
    if (std::strcmp(known.name, name) == 0) *function = known.address;
  }
  if (result != nullptr)
    *result = *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // namespace kf::simt
