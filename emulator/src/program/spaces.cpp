// For stand-alone programs only: memory of the device and memory of the host, told apart by the protection of pages.
//
//                        while the host runs                    while a kernel runs
//   cudaMalloc           no access                              opened where the kernel touches it first
//   cudaMallocManaged    no access where a kernel has written   the same
//                        since the last synchronisation, no
//                        writing where one has read
//   cudaFree'd           no access, until there are too many    no access
//   the host's own       open                                   a pointer to it, as an argument, is changed to one
//                                                               where no memory is
//
// In libraries kernels work on the host's memory, so this is not there. Nor is it under sanitizers, which need memory
// as they manage it. Under a debugger, which would stop at each first access, memory is opened as a whole.
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "../runtime.h"
#include "kf_simt/runtime_api.h"

namespace kf::simt {
namespace {

#if defined(KF_SIMT_ASAN) || defined(KF_SIMT_TSAN)
constexpr bool kProtect = false;
#else
constexpr bool kProtect = true;
#endif
#ifdef KF_SIMT_TSAN
constexpr bool kAliases = false;  // the detector knows no such addresses
#else
constexpr bool kAliases = true;  // a pointer to the host's memory is changed
#endif
constexpr std::size_t kMostRegions = 8192;  // each takes two or more of the process's 65,530 mappings
constexpr std::size_t kMostFreed = 1024;
constexpr std::size_t kSmallRegion = 1 << 20;  // protected by pages, a larger one by 16 of them
// Of the process's time so much may go into changing protections, and at the beginning some more. What is over it stays
// open for a while: kernels in a loop must not become slow.
constexpr double kShare = 0.02, kAtFirst = 0.1;
constexpr double kSignal = 3e-6;  // seconds that the kernel takes to call the handler

// What a kernel has done to a chunk since the host last had it; of the device's own memory, kWritten is open.
enum State : unsigned char { kUntouched, kRead, kWritten };

struct Region {
  Region(char* begin_, std::size_t bytes_, std::size_t mapped_, bool managed_)
      : begin(begin_),
        bytes(bytes_),
        mapped(mapped_),
        managed(managed_),
        chunk(static_cast<std::size_t>(sysconf(_SC_PAGESIZE)) * (mapped_ < kSmallRegion ? 1 : 16)),
        states((mapped_ + chunk - 1) / chunk, kUntouched) {}

  char* begin;
  std::size_t bytes, mapped;
  bool managed;
  std::size_t chunk;  // bytes that change together
  std::vector<unsigned char> states;
  bool touched = false;                           // not all are kUntouched
  const char *kernel = nullptr, *file = nullptr;  // that touched it first
  int line = 0;

  void protect(std::size_t first, std::size_t last, int how) {
    const std::size_t from = first * chunk, to = std::min(last * chunk, mapped);
    // Out of mappings, the kernel refuses to part this one; as a whole it can be opened always.
    if (mprotect(begin + from, to - from, how) != 0 && how != PROT_NONE)
      mprotect(begin, mapped, PROT_READ | PROT_WRITE);
  }
  void open() { mprotect(begin, mapped, PROT_READ | PROT_WRITE); }
  void forget() {
    std::fill(states.begin(), states.end(), kUntouched);
    touched = false;
  }
  // For the host: of managed memory what no kernel has touched, of the device's nothing.
  void give_back() {
    for (std::size_t first = 0, last; first < states.size(); first = last) {
      const unsigned char state = states[first];
      for (last = first + 1; last < states.size() && states[last] == state;) ++last;
      if (managed) {
        protect(first, last, state == kWritten ? PROT_NONE : state == kRead ? PROT_READ : PROT_READ | PROT_WRITE);
      } else if (state != kUntouched) {
        protect(first, last, PROT_NONE);
      }
    }
    if (!managed) forget();
  }
};

double now() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

bool is_traced() {
  char text[4096];
  const int file = open("/proc/self/status", O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  const ssize_t length = read(file, text, sizeof(text) - 1);
  close(file);
  text[length < 0 ? 0 : length] = '\0';
  const char* const tracer = std::strstr(text, "TracerPid:");
  return tracer != nullptr && std::atoi(tracer + 10) != 0;
}

bool is_mapped(std::uintptr_t address) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  unsigned char resident;
  return mincore(reinterpret_cast<void*>(address / page * page), 1, &resident) == 0;
}

// The highest bit of the addresses that this machine gives to a process: without it, a pointer to the host's memory is
// one to where nothing is.
std::uintptr_t top_bit() {
  const int here = 0;
  static const std::uintptr_t bit = std::uintptr_t{1}
                                    << (63 - __builtin_clzll(reinterpret_cast<std::uintptr_t>(&here)));
  return bit;
}

class Spaces : public Program {
 public:
  void* map(std::size_t bytes, bool managed) override {
    if (!kProtect) return nullptr;
    Worker::handle_faults();
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t mapped = (bytes + page - 1) / page * page;
    const SpinLock lock(locked_);
    if (regions_.size() >= kMostRegions || !affordable()) return nullptr;
    const Timer timer(*this);
    // Between two guards: a pointer to before the first element, or behind the last, is not one to the host's memory.
    void* const memory =
        mmap(nullptr, mapped + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    char* const begin = static_cast<char*>(memory) + page;
    mprotect(begin, mapped, PROT_READ | PROT_WRITE);
    Region& region = regions_.emplace(begin, Region(begin, bytes, mapped, managed)).first->second;
    (managed ? managed_ : device_).push_back(&region);
    if (!managed) {  // its first bytes are the runtime's to write
      std::fill(region.states.begin(), region.states.end(), kWritten);
      touch(region);
    }
    return begin;
  }

  void unmap(void* memory) override {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const SpinLock lock(locked_);
    const auto found = regions_.find(static_cast<char*>(memory));
    Region& region = found->second;
    char* const begin = region.begin - page;
    const std::size_t mapped = region.mapped + 2 * page;
    for (auto* list : {&managed_, &device_, &touched_, &reopened_}) {
      list->erase(std::remove(list->begin(), list->end(), &region), list->end());
    }
    regions_.erase(found);
    mmap(begin, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    freed_.push_back({begin, mapped});
    if (freed_.size() > kMostFreed) {
      munmap(freed_.front().first, freed_.front().second);
      freed_.pop_front();
    }
  }

  void open(const void* memory, std::size_t bytes) override {
    const SpinLock lock(locked_);
    Region* const region = holding(static_cast<const char*>(memory));
    if (region == nullptr || (region->managed && !region->touched)) return;
    const Timer timer(*this);
    const auto offset = static_cast<std::size_t>(static_cast<const char*>(memory) - region->begin);
    const std::size_t first = offset / region->chunk, last = (offset + bytes - 1) / region->chunk + 1;
    region->protect(first, last, PROT_READ | PROT_WRITE);
    if (region->managed) {
      reopened_.push_back(region);
    } else {
      std::fill(region->states.begin() + first, region->states.begin() + last, kWritten);
      touch(*region);
    }
  }

  void close(bool synchronised) override {
    const SpinLock lock(locked_);
    if (synchronised && launches_ == 0) {
      for (Region* region : managed_) {
        if (!region->touched) continue;
        region->open();
        region->forget();
      }
    }
    if (launches_ == 0) {
      for (Region* region : reopened_) region->give_back();
      give_back();
    }
    reopened_.clear();
  }

  void begin_launch(const LaunchConfig& config) override {
    const SpinLock lock(locked_);
    config_ = &config;
    if (launches_++ != 0 || !kProtect) return;
    if (traced_) {
      for (Region* region : device_) region->open();
      return;
    }
    if (!affordable()) return;
    const Timer timer(*this);
    for (Region* region : managed_) mprotect(region->begin, region->mapped, PROT_NONE);
    watching_ = true;
  }

  void end_launch() override {
    const SpinLock lock(locked_);
    if (--launches_ != 0) return;
    config_ = nullptr;
    if (traced_) {
      for (Region* region : device_) mprotect(region->begin, region->mapped, PROT_NONE);
      return;
    }
    if (watching_) {
      const Timer timer(*this);
      for (Region* region : managed_) region->give_back();
    }
    watching_ = false;
    give_back();
  }

  bool take(const Fault& fault, bool by_device) override {
    const SpinLock lock(locked_);
    const auto* const address = static_cast<const char*>(fault.address);
    Region* const region = holding(address);
    if (region == nullptr || address < region->begin || address >= region->begin + region->mapped) return false;
    const Timer timer(*this, kSignal);
    const std::size_t chunk = static_cast<std::size_t>(address - region->begin) / region->chunk;
    unsigned char& state = region->states[chunk];
    if (by_device) {
      const bool whole = !region->managed || fault.write || state != kUntouched;
      state = std::max<unsigned char>(state, whole ? kWritten : kRead);
      region->protect(chunk, chunk + 1, whole ? PROT_READ | PROT_WRITE : PROT_READ);
      touch(*region);
      return true;
    }
    if (!region->managed) return false;
    if (state == kUntouched) {  // while a launch of another thread goes on
      region->protect(chunk, chunk + 1, PROT_READ | PROT_WRITE);
      return true;
    }
    warn(*region, fault, state);
    region->open();
    region->forget();
    return true;
  }

  bool explain(Fault* fault, bool by_device, char* text, std::size_t size) override {
    const SpinLock lock(locked_);
    const auto* const address = static_cast<const char*>(fault->address);
    for (const auto& [begin, bytes] : freed_) {
      if (address < begin || address >= begin + bytes) continue;
      std::snprintf(text, size, ", %td bytes into memory that cudaFree has taken back",
                    address - begin - sysconf(_SC_PAGESIZE));
      return true;
    }
    if (const Region* const region = holding(address)) {
      const std::ptrdiff_t offset = address - region->begin;
      const auto behind = offset - static_cast<std::ptrdiff_t>(region->bytes);
      const char* const giver = region->managed ? "cudaMallocManaged" : "cudaMalloc";
      if (offset < 0 || behind >= 0) {
        std::snprintf(text, size, ", %td bytes %s the %zu bytes that %s gave", offset < 0 ? -offset : behind,
                      offset < 0 ? "before" : "past the end of", region->bytes, giver);
      } else {
        std::snprintf(text, size, ", %td bytes into memory that %s gave: only kernels and CUDA's calls reach it",
                      offset, giver);
      }
      return true;
    }
    const std::uintptr_t own = reinterpret_cast<std::uintptr_t>(address) ^ top_bit();
    if (!kAliases || !by_device || own < 0x10000 || !(own & top_bit()) || !is_mapped(own)) return false;
    fault->address = reinterpret_cast<const void*>(own);
    std::snprintf(text, size,
                  ", which is the host's memory: kernels reach what cudaMalloc, cudaMallocManaged, cudaMallocHost or "
                  "cudaHostRegister gave");
    return true;
  }

  void copied(void* memory, std::size_t bytes, bool to_device) override;

  // Whether there is memory of the device's, or was, or it begins or ends beside.
  bool has(const char* address) {
    const SpinLock lock(locked_);
    if (holding(address) != nullptr) return true;
    for (const auto& [begin, bytes] : freed_) {
      if (address >= begin && address < begin + bytes) return true;
    }
    return false;
  }

 private:
  // Adds to what has been spent.
  class Timer : Pinned {
   public:
    explicit Timer(Spaces& spaces, double more = 0) : spaces_(spaces), begin_(now() - more) {}
    ~Timer() { spaces_.spent_ += now() - begin_; }

   private:
    Spaces& spaces_;
    double begin_;
  };

  bool affordable() const { return spent_ < kAtFirst + kShare * (now() - began_); }

  // Also of addresses in its guards.
  Region* holding(const char* address) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    auto after = regions_.upper_bound(const_cast<char*>(address));
    if (after != regions_.end() && address >= after->first - page) return &after->second;
    if (after == regions_.begin()) return nullptr;
    Region& region = (--after)->second;
    return address < region.begin + region.mapped + page ? &region : nullptr;
  }

  void touch(Region& region) {
    if (region.touched) return;
    region.touched = true;
    if (config_ != nullptr) {
      region.kernel = config_->name;
      region.file = config_->file;
      region.line = config_->line;
    }
    if (!region.managed) touched_.push_back(&region);
  }

  // Of the device's memory, what has been opened; the list holds it until there is time.
  void give_back() {
    if (touched_.empty() || !affordable()) return;
    const Timer timer(*this);
    for (Region* region : touched_) region->give_back();
    touched_.clear();
  }

  static void warn(const Region& region, const Fault& fault, unsigned char state) {
    const bool own = fault.at >= code_begin && fault.at < code_end;
    const std::string line = own ? line_of(fault.at) : "";
    std::fprintf(stderr,
                 "warning: the host %s %p%s%s, %zu bytes into managed memory that kernel %s (%s:%d) %s, before it "
                 "synchronises: a GPU may still be at work\n",
                 fault.write ? "writes to" : "reads", fault.address, line.empty() ? "" : " at ", line.c_str(),
                 static_cast<std::size_t>(static_cast<const char*>(fault.address) - region.begin),
                 region.kernel == nullptr ? "" : region.kernel, region.file == nullptr ? "" : region.file, region.line,
                 state == kWritten ? "writes" : "reads");
  }

  std::atomic_flag locked_ = ATOMIC_FLAG_INIT;
  std::map<char*, Region> regions_;
  std::vector<Region*> managed_, device_;
  std::vector<Region*> touched_;   // of the device's memory, what is open
  std::vector<Region*> reopened_;  // of managed memory, for a call of CUDA's
  std::deque<std::pair<char*, std::size_t>> freed_;
  const LaunchConfig* config_ = nullptr;
  unsigned launches_ = 0;
  bool watching_ = false;
  const bool traced_ = kProtect && is_traced();
  const double began_ = now();
  double spent_ = 0;
};

// An argument of a kernel, if it is a pointer: the same, or one to nowhere if it is to the host's memory.
const void* seen_by_device(const void* pointer) {
  const auto at = reinterpret_cast<std::uintptr_t>(pointer);
  if (!kAliases || at < 0x10000 || !(at & top_bit()) || at >> 48 != 0 || (at >= code_begin && at < code_end))
    return pointer;
  cudaPointerAttributes attributes;
  cudaPointerGetAttributes(&attributes, pointer);
  if (attributes.type != cudaMemoryTypeUnregistered || lasting<Spaces>().has(static_cast<const char*>(pointer))) {
    return pointer;
  }
  // Behind the last element of memory from elsewhere: pinned, or the heap's.
  cudaPointerGetAttributes(&attributes, static_cast<const char*>(pointer) - 1);
  if (attributes.type != cudaMemoryTypeUnregistered) return pointer;
  return is_mapped(at) && !is_mapped(at ^ top_bit()) ? reinterpret_cast<const void*>(at ^ top_bit()) : pointer;
}

// A structure that is copied to the device may hold pointers to the host's memory: there they point nowhere, and on the
// way back they are what they were. Only small copies are looked at: data of that size that looks like such pointers,
// to memory that is there, is not to be expected.
constexpr std::size_t kMostOfAStructure = 4096;

class Originals {
 public:
  void to_device(void* memory, std::size_t bytes) {
    if (bytes > kMostOfAStructure) return;
    each_word(memory, bytes, [this](const void* word) {
      const void* const seen = seen_by_device(word);
      if (seen != word) {
        const std::lock_guard<std::mutex> lock(mutex_);
        known_.insert(word);
      }
      return seen;
    });
  }
  void to_host(void* memory, std::size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (known_.empty()) return;
    each_word(memory, bytes, [this](const void* word) {
      const auto* const original = reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(word) ^ top_bit());
      return known_.count(original) != 0 ? original : word;
    });
  }

  template <class Change>
  static void each_word(void* memory, std::size_t bytes, Change change) {
    auto* const begin = static_cast<char*>(memory);
    for (std::size_t at = 0; at + sizeof(void*) <= bytes; at += sizeof(void*)) {
      const void* word;
      std::memcpy(&word, begin + at, sizeof(word));
      const void* const other = change(word);
      if (other != word) std::memcpy(begin + at, &other, sizeof(other));
    }
  }

 private:
  std::mutex mutex_;
  std::set<const void*> known_;
};

void Spaces::copied(void* memory, std::size_t bytes, bool to_device) {
  if (to_device) {
    lasting<Originals>().to_device(memory, bytes);
  } else {
    lasting<Originals>().to_host(memory, bytes);
  }
}

[[maybe_unused]] const bool installed = (program = &lasting<Spaces>(), true);

}  // namespace

// What the launch of a program does with its arguments, see launch.h.
const void* kf_seen_by_device(const void* pointer) { return seen_by_device(pointer); }

void kf_words_seen_by_device(void* object, std::size_t bytes) { Originals::each_word(object, bytes, seen_by_device); }

}  // namespace kf::simt
