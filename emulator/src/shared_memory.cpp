// A block's shared memory: the red zones around its variables, and its addresses in PTX.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "scheduler.h"

#ifdef KF_SIMT_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace kf::simt {

namespace {

constexpr std::size_t kZone = 128;
constexpr std::size_t kDynamicAlign = 1024;
constexpr std::size_t kStaticSpace = 256 * 1024;  // 48 KB of variables, and the red zones between them
constexpr std::size_t kArenaBytes = kDynamicAlign + kSharedLimit + kDynamicAlign + kStaticSpace + kDynamicAlign;
constexpr unsigned char kPoison = 0xff;                        // NaN in every floating-point format, -1 as an integer
constexpr std::uint64_t kZonePattern = 0xfffbfffbfffbfffbULL;  // NaN as well, but not what poison looks like

// What no thread has written yet. ThreadSanitizer would take an ordinary memset for accesses of whoever runs.
void poison(char* begin, std::size_t bytes) {
#ifdef KF_SIMT_TSAN
  race::fill(begin, kPoison, bytes);
#else
  std::memset(begin, kPoison, bytes);
#endif
}

std::size_t round_up(std::size_t n, std::size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace

void Worker::map_arena() {
  const race::Quiet quiet;  // or this would be a write by this OS thread, which comes before no thread of a grid
  void* const memory =
      mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  arena_ = static_cast<char*>(memory);
  dynamic_ = reinterpret_cast<char*>(round_up(reinterpret_cast<std::uintptr_t>(arena_) + kZone, kDynamicAlign));
  static_begin_ = dynamic_ + kSharedLimit + kDynamicAlign;
  static_end_ = static_begin_ + kStaticSpace;
  static_next_ = static_begin_;
#ifdef KF_SIMT_ASAN
  __asan_poison_memory_region(static_begin_, kStaticSpace);
#endif
}

void Worker::unmap_arena() {
#ifdef KF_SIMT_ASAN
  __asan_unpoison_memory_region(arena_, kArenaBytes);
#endif
  munmap(arena_, kArenaBytes);
}

void Worker::fill_zone(char* begin, std::size_t bytes) {
  for (std::size_t i = 0; i + sizeof(kZonePattern) <= bytes; i += sizeof(kZonePattern)) {
    std::memcpy(begin + i, &kZonePattern, sizeof(kZonePattern));
  }
}

void Worker::begin_shared() {
  const std::size_t bytes = launch_->config.shared;
#ifdef KF_SIMT_TSAN
  forget_shared();
#endif
#ifdef KF_SIMT_ASAN
  if (poisoned_for_ != bytes) {
    __asan_poison_memory_region(dynamic_ - kZone, static_cast<std::size_t>(static_begin_ - dynamic_) + kZone);
    __asan_unpoison_memory_region(dynamic_, bytes);
    poisoned_for_ = bytes;
  }
  poison(dynamic_, bytes);
  if (launch_->cluster_size > 1) {
    __asan_unpoison_memory_region(static_begin_, kStaticSpace);
    poison(static_begin_, kStaticSpace);
    __asan_poison_memory_region(static_begin_, kStaticSpace);
  } else {
    __asan_poison_memory_region(static_begin_, static_cast<std::size_t>(static_next_ - static_begin_) + kZone);
  }
#else
  fill_zone(dynamic_ - kZone, kZone);
  poison(dynamic_, bytes);
  fill_zone(dynamic_ + bytes, kZone);
  // Blocks of a cluster may write each other's variables before their owner comes to the declaration.
  if (launch_->cluster_size > 1) poison(static_begin_, kStaticSpace);
#endif
  static_next_ = static_begin_;
  number_next_ = first_static_number(bytes);
  static_bytes_ = 0;
  static_variables_.clear();
  ++blocks_run_;
}

#ifdef KF_SIMT_TSAN
// No thread has used the shared memory of this block yet: of the block before, only what it had is to be forgotten.
void Worker::forget_shared() {
  const auto renew = [](char* begin, char* end) {
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const std::uintptr_t first = reinterpret_cast<std::uintptr_t>(begin) / page * page;
    race::renew(reinterpret_cast<char*>(first),
                reinterpret_cast<char*>(round_up(reinterpret_cast<std::uintptr_t>(end), page)));
  };
  if (in_cluster_before_) {  // other blocks may have written anywhere
    renew(arena_, static_end_);
  } else {
    if (dynamic_before_ != 0) renew(dynamic_ - kZone, dynamic_ + dynamic_before_ + kZone);
    if (static_next_ != static_begin_) renew(static_begin_, static_next_ + kZone);
  }
  in_cluster_before_ = launch_->cluster_size > 1;
  dynamic_before_ = launch_->config.shared;
}
#endif

void* Worker::static_shared(SharedSlot& slot) {
  const Inside inside(*this);
  int id = slot.id.load(std::memory_order_acquire);
  if (id < 0) {
    static std::atomic<int> slots{0};
    int unset = -1;
    const int fresh = slots.fetch_add(1);
    id = slot.id.compare_exchange_strong(unset, fresh) ? fresh : unset;
  }
  const auto index = static_cast<std::size_t>(id);
  if (index >= static_table_.size()) {
    const race::Quiet quiet;
    static_table_.resize(index + 16);
  }
  StaticEntry& entry = static_table_[index];
  if (entry.block == blocks_run_) return entry.address;

  static_bytes_ = round_up(static_bytes_, std::max<std::size_t>(slot.align, 1)) + slot.size;
  if (static_bytes_ > kStaticLimit || static_bytes_ + launch_->config.shared > kSharedLimit) {
    fail([&] {
      return "needs " + std::to_string(static_bytes_) + " bytes of static and " +
             std::to_string(launch_->config.shared) + " bytes of dynamic shared memory at `" + slot.name + "` (" +
             text_of(CallSite{slot.file, slot.line, 0}) + "); the limits are 48 KB static and 227 KB in all";
    });
  }
  const bool alone = launch_->cluster_size == 1;
  if (!alone) race_.run_worker();  // the lock of the launch is no meeting of threads
  const StaticPlace place =
      alone ? next_static_place({nullptr, static_cast<std::size_t>(static_next_ - static_begin_), number_next_}, slot)
            : launch_->static_place(slot);
  if (!alone) race_.run(current_);
  char* const address = static_begin_ + place.offset;
  if (address + slot.size + 2 * kZone > static_end_)
    fail([&] { return std::string("has too many variables in shared memory"); });
#ifdef KF_SIMT_ASAN
  __asan_unpoison_memory_region(address, slot.size);
#else
  fill_zone(address - kZone, kZone);
  fill_zone(address + slot.size, kZone);
#endif
  if (alone) poison(address, slot.size);
  static_next_ = address + slot.size;
  number_next_ = place.number + static_cast<unsigned>(slot.size);
  {
    const race::Quiet quiet;
    static_variables_.push_back({&slot, address, place.number});
  }
  entry = {blocks_run_, address};
  return address;
}

bool Worker::shared_variable(const void* address, const SharedSlot** variable) const {
  const char* const at = static_cast<const char*>(address);
  *variable = nullptr;
  if (at < arena_ || at >= static_end_) return false;
  for (const StaticVariable& known : static_variables_) {
    if (at >= known.address && at < known.address + known.slot->size) *variable = known.slot;
  }
  return true;
}

unsigned first_static_number(std::size_t dynamic_bytes) {
  return kDynamicNumber + static_cast<unsigned>(round_up(dynamic_bytes + 1, 1024));
}

// `before` names the end of the variable before: its place, and in `slot` the variable, or null if it is the end.
StaticPlace next_static_place(const StaticPlace& before, const SharedSlot& slot) {
  const std::size_t size_before = before.slot != nullptr ? before.slot->size : 0;
  // Aligned to 16 at least, and so the zone before it begins where the granules of AddressSanitizer do.
  const std::size_t align = std::max<std::size_t>(slot.align, 16);
  return {&slot, round_up(before.offset + size_before + kZone, align),
          static_cast<unsigned>(round_up(before.number + size_before, align))};
}

StaticPlace Launch::static_place(const SharedSlot& slot) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (const StaticPlace& known : static_places) {
    if (known.slot == &slot) return known;
  }
  const StaticPlace before =
      static_places.empty() ? StaticPlace{nullptr, 0, first_static_number(config.shared)} : static_places.back();
  static_places.push_back(next_static_place(before, slot));
  return static_places.back();
}

// Without AddressSanitizer a write into a red zone is found when the block has ended.
void Worker::check_shared() {
  if (const KernelInfo* const kernel = entered_kernel) {
    auto& known = const_cast<KernelInfo*>(kernel)->static_bytes;
    if (known.load(std::memory_order_relaxed) < static_cast<int>(static_bytes_)) {
      known.store(static_cast<int>(static_bytes_), std::memory_order_relaxed);
    }
  }
#ifndef KF_SIMT_ASAN
  const auto intact = [](const char* begin) {
    for (std::size_t i = 0; i < kZone / 2; i += sizeof(kZonePattern)) {
      if (std::memcmp(begin + i, &kZonePattern, sizeof(kZonePattern)) != 0) return false;
    }
    return true;
  };
  const auto where = [this] {
    return "kernel " + kernel_name() + ", block " + text_of(block_index_) + ", a thread of it: wrote ";
  };
  for (const StaticVariable& variable : static_variables_) {
    const char* side = !intact(variable.address + variable.slot->size) ? "past the end of"
                       : !intact(variable.address - kZone / 2)         ? "before the beginning of"
                                                                       : nullptr;
    if (side == nullptr) continue;
    launch_->fail(std::make_exception_ptr(Error(where() + side + " `" + variable.slot->name + "` in shared memory (" +
                                                text_of(CallSite{variable.slot->file, variable.slot->line, 0}) +
                                                "); AddressSanitizer would name the line")));
    return;
  }
  if (!intact(dynamic_ + launch_->config.shared) || !intact(dynamic_ - kZone / 2)) {
    launch_->fail(
        std::make_exception_ptr(Error(where() + "outside of the " + std::to_string(launch_->config.shared) +
                                      " bytes of dynamic shared memory; AddressSanitizer would name the line")));
  }
#endif
}

bool Worker::in_arena(const void* generic) const {
  const char* const at = static_cast<const char*>(generic);
  return at >= arena_ && at < static_end_;
}

bool Worker::in_cluster(const void* address) const {
  if (cluster_ == nullptr) return in_arena(address);
  for (const Worker* const member : cluster_->members) {
    if (member->in_arena(address)) return true;
  }
  return false;
}

unsigned Worker::shared_address(const void* generic) {
  const char* at = static_cast<const char*>(generic);
  unsigned rank = 0;  // of another block, plus one
  if (!in_arena(at)) {
    for (unsigned r = 0; cluster_ != nullptr && r < launch_->cluster_size && rank == 0; ++r) {
      if (cluster_->members[r]->in_arena(at)) rank = r + 1;
    }
    if (rank == 0) fail([&] { return "takes the shared address of what is not in shared memory"; });
    at = static_cast<const char*>(cluster_->members[rank - 1]->in_arena_of(*this, at));
  }
  if (at < static_begin_) return rank << 24 | static_cast<unsigned>(kDynamicNumber + (at - dynamic_));
  const StaticVariable* below = nullptr;
  for (const StaticVariable& known : static_variables_) {
    if (known.address <= at && (below == nullptr || known.address > below->address)) below = &known;
  }
  if (below == nullptr) fail([&] { return "takes the shared address of no variable"; });
  return rank << 24 | static_cast<unsigned>(below->number + (at - below->address));
}

void* Worker::shared_pointer(unsigned address) {
  const unsigned rank = address >> 24, number = address & 0xffffff;
  char* own = nullptr;
  if (number < first_static_number(launch_->config.shared)) {
    own = dynamic_ + (static_cast<std::ptrdiff_t>(number) - static_cast<std::ptrdiff_t>(kDynamicNumber));
  } else {
    const StaticVariable* below = nullptr;
    for (const StaticVariable& known : static_variables_) {
      if (known.number <= number && (below == nullptr || known.number > below->number)) below = &known;
    }
    if (below != nullptr) own = below->address + (number - below->number);
  }
  if (own == nullptr || number < kDynamicNumber - 128) {
    fail([&] { return "uses " + std::to_string(address) + " as an address in shared memory, where nothing is"; });
  }
  if (rank == 0) return own;
  Worker& other = member(rank - 1, "uses an address in the shared memory");
#ifdef KF_SIMT_ASAN
  // The other block may not have come to the variable's declaration yet.
  for (const StaticVariable& known : static_variables_) {
    __asan_unpoison_memory_region(in_arena_of(other, known.address), known.slot->size);
  }
#endif
  return in_arena_of(other, own);
}

// What kernels call.

void* static_shared_address(SharedSlot& slot) { return running("__shared__ memory").static_shared(slot); }
void* dynamic_shared_address() { return Worker::mine().dynamic_shared(); }
unsigned kf_shared_address(const void* generic) { return running("a shared address").shared_address(generic); }
void* kf_shared_pointer(unsigned address) { return running("a shared address").shared_pointer(address); }
unsigned map_shared_rank(unsigned address, unsigned rank) {
  running("mapa").member(rank, "maps to the shared memory");
  return (address & 0xffffff) | (rank + 1) << 24;
}
void* map_shared_rank(const void* generic, unsigned rank) {
  return kf_shared_pointer(map_shared_rank(kf_shared_address(generic), rank));
}
bool kf_is_shared(const void* generic) { return running("a shared address").in_arena(generic); }
bool kf_is_cluster_shared(const void* generic) { return running("a shared address").in_cluster(generic); }

}  // namespace kf::simt
