// The race detector: ThreadSanitizer, fed with the threads of the grid. This file is compiled without instrumentation,
// like the rest of the runtime; only kernels and host code of the program are instrumented.
#ifdef KF_SIMT_TSAN

#include "race.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>

#include "runtime.h"

extern "C" {
// ThreadSanitizer's interface. Its header declares only a part of these.
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_set_fiber_name(void* fiber, const char* name);
void* __tsan_get_current_fiber();
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_ignore_thread_begin();
void __tsan_ignore_thread_end();
void __tsan_read_range(void* address, unsigned long bytes);
void __tsan_write_range(void* address, unsigned long bytes);
void* __tsan_get_current_report();
int __tsan_get_report_data(void* report, const char** description, int* count, int* stack_count, int* mop_count,
                           int* loc_count, int* mutex_count, int* thread_count, int* unique_tid_count,
                           void** sleep_trace, unsigned long trace_size);
int __tsan_get_report_mop(void* report, unsigned long index, int* tid, void** address, int* size, int* write,
                          int* atomic, void** trace, unsigned long trace_size);
int __tsan_get_report_loc(void* report, unsigned long index, const char** type, void** address, void** start,
                          unsigned long* size, int* tid, int* fd, int* suppressable, void** trace,
                          unsigned long trace_size);
int __tsan_get_report_thread(void* report, unsigned long index, int* tid, unsigned long long* os_id, int* running,
                             const char** name, int* parent_tid, void** trace, unsigned long trace_size);
void AnnotateBenignRaceSized(const char* file, int line, const volatile void* address, unsigned long bytes,
                             const char* what);
void __sanitizer_symbolize_pc(void* pc, const char* format, char* text, std::size_t bytes);

__attribute__((visibility("default"))) const char* __tsan_default_options() {
  return "atexit_sleep_ms=0:suppress_equal_addresses=0:history_size=2:report_signal_unsafe=0:report_thread_leaks=0";
}
}

namespace kf::simt::race {
namespace {

constexpr unsigned kNoSynchronisation = 1;  // flag of __tsan_switch_to_fiber
constexpr int kFrames = 24;

struct Access {
  bool known, host;  // neither: a thread that is not known any more
  uint3 block, thread;
  bool used_before;  // by a thread of an earlier block
  void* trace[kFrames];
  int size;
  bool write, atomic;
};

struct Report {
  Access access[2];  // the later one first
  const char* address;
  const SharedSlot* variable;  // in shared memory; null if it is dynamic
  bool shared, other_block;    // in shared memory; in that of another block of the cluster
};

// Reports come while ThreadSanitizer holds its locks: nothing here may allocate, or lock what it knows.
constexpr unsigned kMaxReports = 64;
Report reports[kMaxReports];
unsigned report_count = 0, lost = 0;
std::atomic_flag reports_lock = ATOMIC_FLAG_INIT;

// ThreadSanitizer knows a fiber by a name that is given once and holds its number: a new name for each thread of the
// grid would take longer than most threads. Which thread it is stands here.
constexpr const char* kFiberName = "fiber ";
struct Fiber {
  void* handle;
  std::atomic<std::uint64_t> block;   // x, y and z in 32, 16 and 16 bits
  std::atomic<std::uint32_t> thread;  // x, y and z in 10 bits each
  std::atomic<bool> used_before;      // in this launch, by another thread
};
Fiber fibers[kMaxResident];

// Those that no launch uses. A fiber takes most of a millisecond to make, so none is destroyed.
unsigned spare[kMaxResident];
unsigned spare_count = 0, made = 0;
std::atomic_flag spare_lock = ATOMIC_FLAG_INIT;

void make_fiber(unsigned number) {
  char name[32];
  std::snprintf(name, sizeof(name), "%s%u", kFiberName, number);
  fibers[number].handle = __tsan_create_fiber(0);
  __tsan_set_fiber_name(fibers[number].handle, name);
}

unsigned take_fiber() {
  unsigned number = kMaxResident;
  {
    const SpinLock lock(spare_lock);
    if (spare_count != 0) return spare[--spare_count];
    if (made < kMaxResident) number = made++;
  }
  if (number == kMaxResident) {
    throw Error("the race detector cannot follow more than " + std::to_string(kMaxResident) +
                " threads at a time; use fewer or smaller blocks");
  }
  make_fiber(number);
  return number;
}

void give_back(const std::vector<unsigned>& numbers) {
  const SpinLock lock(spare_lock);
  for (const unsigned number : numbers) spare[spare_count++] = number;
}

void read_thread(const Fiber& fiber, Access& access) {
  const std::uint64_t block = fiber.block.load(std::memory_order_relaxed);
  const std::uint32_t thread = fiber.thread.load(std::memory_order_relaxed);
  access.known = true;
  access.block = {static_cast<unsigned>(block >> 32), static_cast<unsigned>(block >> 16 & 0xffff),
                  static_cast<unsigned>(block & 0xffff)};
  access.thread = {thread >> 20, thread >> 10 & 0x3ff, thread & 0x3ff};
  access.used_before = fiber.used_before.load(std::memory_order_relaxed);
}

struct Stacks {
  const char *begin, *end;
};
constexpr unsigned kMaxStacks = 4096;
Stacks stacks[kMaxStacks];
std::atomic<unsigned> stacks_used{0};
std::atomic_flag stacks_lock = ATOMIC_FLAG_INIT;

bool on_a_stack(const void* address) {
  const char* const at = static_cast<const char*>(address);
  for (unsigned i = 0; i < stacks_used.load(std::memory_order_acquire); ++i) {
    if (at >= stacks[i].begin && at < stacks[i].end) return true;
  }
  return false;
}

// Takes one of ThreadSanitizer's reports. False if it concerns no kernel.
bool take(void* report) {
  const char* description = nullptr;
  int count = 0, stack_count = 0, accesses = 0, locations = 0, mutexes = 0, threads = 0, tids = 0;
  void* sleep_trace[1] = {};
  __tsan_get_report_data(report, &description, &count, &stack_count, &accesses, &locations, &mutexes, &threads, &tids,
                         sleep_trace, 1);
  if (accesses != 2) return false;

  Report found{};
  bool in_kernel = false;
  for (int i = 0; i < 2; ++i) {
    int tid = 0, size = 0, write = 0, atomic = 0;
    void* address = nullptr;
    Access& access = found.access[i];
    __tsan_get_report_mop(report, static_cast<unsigned long>(i), &tid, &address, &size, &write, &atomic, access.trace,
                          kFrames);
    if (i == 0) found.address = static_cast<const char*>(address);
    access.size = size;
    access.write = write != 0;
    access.atomic = atomic != 0;
    for (int t = 0; t < threads; ++t) {
      int other = 0, running = 0, parent = 0;
      unsigned long long os_id = 0;
      const char* name = nullptr;
      void* trace[1] = {};
      __tsan_get_report_thread(report, static_cast<unsigned long>(t), &other, &os_id, &running, &name, &parent, trace,
                               1);
      if (other != tid) continue;
      const std::size_t prefix = std::strlen(kFiberName);
      const bool of_the_grid = name != nullptr && std::strncmp(name, kFiberName, prefix) == 0;
      if (of_the_grid) {
        read_thread(fibers[std::strtoul(name + prefix, nullptr, 10)], access);
      } else {
        access.host = true;
      }
      in_kernel = in_kernel || of_the_grid;
    }
  }
  const Worker* const worker = Worker::in_kernel();
  if (!in_kernel || worker == nullptr) return false;
  if (on_a_stack(found.address)) return true;
  if (locations > 0) {
    const char* type = nullptr;
    void *address = nullptr, *start = nullptr, *trace[1] = {};
    unsigned long size = 0;
    int tid = 0, fd = 0, suppressable = 0;
    __tsan_get_report_loc(report, 0, &type, &address, &start, &size, &tid, &fd, &suppressable, trace, 1);
    if (type != nullptr && std::strcmp(type, "tls") == 0) return true;  // the emulation's own, of an OS thread
  }
  found.shared = worker->shared_variable(found.address, &found.variable);
  found.other_block = !found.shared && worker->in_cluster(found.address);

  const SpinLock lock(reports_lock);
  if (report_count < kMaxReports) {
    reports[report_count++] = found;
  } else {
    ++lost;
  }
  return true;
}

// "file:line" of the innermost frame that is not the emulation's own, or an empty string.
std::string place_of(void* const* trace) {
  static const std::string own = [] {
    const std::string here = __FILE__;  // …/simt/src/race.cpp
    return here.substr(0, here.rfind("src/")) + "include/";
  }();
  for (int i = 0; i < kFrames && trace[i] != nullptr; ++i) {
    char text[4096] = {};
    __sanitizer_symbolize_pc(trace[i], "%S", text, sizeof(text) - 2);
    // Functions that were inlined into each other follow each other, innermost first.
    for (const char* at = text; *at != '\0'; at += std::strlen(at) + 1) {
      std::string place = at;
      if (place.find('/') == std::string::npos || place.find(own) != std::string::npos) continue;
      if (place.rfind("/usr/", 0) == 0 || place.find("libsanitizer/") != std::string::npos) continue;
      if (place.find("<null>") != std::string::npos) continue;
      const std::size_t colon = place.find(':');  // file:line:column
      const std::size_t column = colon == std::string::npos ? colon : place.find(':', colon + 1);
      return place.substr(0, column);
    }
  }
  return "";
}

std::string verb(const Access& access, bool past) {
  const std::string how = access.atomic ? "atomically " : "";
  if (access.write) return how + (past ? "wrote" : "writes");
  return how + (past ? "read" : "reads");
}

// What would have ordered the two.
std::string missing(const Report& report) {
  const Access &a = report.access[0], &b = report.access[1];
  if (b.host) return "Has the host freed this memory?";
  const bool same_block = a.known && b.known && std::memcmp(&a.block, &b.block, sizeof(a.block)) == 0;
  if (!same_block && (report.shared || report.other_block)) return "No barrier of the cluster is between them";
  if (!same_block) {
    return "Nothing orders blocks but a flag with __threadfence() on both sides, grid.sync(), or the end of the kernel";
  }
  const auto warp = [&](const Access& access) {
    return (access.thread.x + blockDim.x * (access.thread.y + blockDim.y * access.thread.z)) / warpSize;
  };
  return warp(a) == warp(b) ? "No __syncwarp() or __syncthreads() is between them"
                            : "No __syncthreads() is between them";
}

std::string describe(const Report& report) {
  const Access &later = report.access[0], &earlier = report.access[1];
  const auto who = [](const Access& access, bool past) {
    if (!access.known) return std::string(access.host ? "the host" : "a thread of an earlier block");
    return "block " + text_of(access.block) + " thread " + text_of(access.thread) +
           (access.used_before && past ? ", or the same one of a block that ran before," : "");
  };
  const auto where = [](const Access& access) {
    const std::string place = place_of(access.trace);
    return place.empty() ? std::string("a line that is no longer known") : place;
  };
  std::string text = "race in ";
  if (report.other_block) {
    text += "shared memory of another block of the cluster";
  } else if (!report.shared) {
    text += "global memory";
  } else if (report.variable != nullptr) {
    text += std::string("shared memory, `") + report.variable->name + "`";
  } else {
    text += "dynamic shared memory";
  }
  text += "\n    " + who(later, false) + " " + verb(later, false) + " " + std::to_string(later.size) + " byte" +
          (later.size == 1 ? "" : "s") + " at " + where(later);
  text += "\n    " + who(earlier, true) + " " + verb(earlier, true) + " " + (earlier.size == 1 ? "it" : "them") +
          " at " + where(earlier);
  return text + "\n    " + missing(report);
}

}  // namespace

Token::Token() : memory_(std::malloc(16)) {
  if (memory_ == nullptr) throw std::bad_alloc();
}
Token::~Token() { std::free(memory_); }
void Token::release() const { __tsan_release(memory_); }
void Token::acquire() const { __tsan_acquire(memory_); }

Quiet::Quiet() { __tsan_ignore_thread_begin(); }
Quiet::~Quiet() { __tsan_ignore_thread_end(); }

Threads::Threads() : worker_(__tsan_get_current_fiber()) {}

void Threads::begin_block(unsigned threads, const uint3& block, const uint3* index_of, unsigned at_most,
                          const Token& begins) {
  if (next_ + threads > std::max(at_most, threads)) next_ = 0;
  first_ = next_;
  next_ += threads;
  const std::size_t known = ring_.size();
  while (ring_.size() < next_) {
    const unsigned number = take_fiber();
    {
      const Quiet quiet;
      ring_.push_back(number);
    }
    __tsan_switch_to_fiber(fibers[number].handle, kNoSynchronisation);
    begins.acquire();
    run_worker();
  }
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[ring_[first_ + i]];
    const uint3& thread = index_of[i];
    fiber.block.store(std::uint64_t{block.x} << 32 | block.y << 16 | block.z, std::memory_order_relaxed);
    fiber.thread.store(thread.x << 20 | thread.y << 10 | thread.z, std::memory_order_relaxed);
    fiber.used_before.store(first_ + i < known, std::memory_order_relaxed);
  }
}

// ThreadSanitizer keeps a stack of calls for each fiber; that of a thread which is left in the middle never empties.
void Threads::replace(unsigned thread) {
  const unsigned number = ring_[first_ + thread];
  __tsan_destroy_fiber(fibers[number].handle);
  make_fiber(number);
}

// A fiber releases once for all that it was in this launch: each release of a token that others have released walks
// over the clocks of all.
void Threads::end_launch(const Token& ends) {
  for (const unsigned number : ring_) {
    __tsan_switch_to_fiber(fibers[number].handle, kNoSynchronisation);
    ends.release();
  }
  run_worker();
  give_back(ring_);
  ring_.clear();
  next_ = 0;
}

void Threads::run(unsigned thread) {
  __tsan_switch_to_fiber(fibers[ring_[first_ + thread]].handle, kNoSynchronisation);
}
void Threads::run_worker() { __tsan_switch_to_fiber(worker_, kNoSynchronisation); }

void Threads::release(const unsigned* threads, unsigned count, const Token& token) {
  for (unsigned i = 0; i < count; ++i) {
    run(threads[i]);
    token.release();
  }
}

void Threads::acquire(const unsigned* threads, unsigned count, const Token& token) {
  for (unsigned i = 0; i < count; ++i) {
    run(threads[i]);
    token.acquire();
  }
}

void Threads::order(const unsigned* threads, unsigned count, unsigned current) {
  {
    run_worker();
    const Token token;
    release(threads, count, token);
    acquire(threads, count, token);
    run_worker();
  }
  run(current);
}

// Barriers that lie in shared memory begin anew with each block, so their tokens are kept here and not by address.
namespace {
using Tokens = std::map<const void*, Token>;
std::atomic_flag tokens_lock = ATOMIC_FLAG_INIT;

const Token& token_of(const void* address) {
  const Quiet quiet;
  const SpinLock lock(tokens_lock);
  return lasting<Tokens>()[address];
}
}  // namespace

void renew(char* begin, char* end) {
  // ThreadSanitizer forgets what it knew of memory that is mapped while it looks away.
  __tsan_ignore_thread_begin();
  void* const mapped = mmap(begin, static_cast<std::size_t>(end - begin), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  __tsan_ignore_thread_end();
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  const Quiet quiet;
  const SpinLock lock(tokens_lock);
  lasting<Tokens>().erase(lasting<Tokens>().lower_bound(begin), lasting<Tokens>().lower_bound(end));
}

void fill(char* begin, unsigned char value, std::size_t bytes) {
  const std::uint64_t word = 0x0101010101010101ULL * value;
  std::size_t i = 0;
  for (; i + sizeof(word) <= bytes; i += sizeof(word)) {
    std::memcpy(begin + i, &word, sizeof(word));
    asm volatile("" ::: "memory");  // or the compiler makes a memset of it
  }
  for (; i < bytes; ++i) {
    begin[i] = static_cast<char>(value);
    asm volatile("" ::: "memory");
  }
}

void add_stacks(const char* begin, const char* end) {
  // Or it makes a whole report, only for take() to drop it, each time that a stack has passed to another thread.
  AnnotateBenignRaceSized(__FILE__, __LINE__, begin, static_cast<unsigned long>(end - begin), "stacks of threads");
  const SpinLock lock(stacks_lock);
  const unsigned used = stacks_used.load(std::memory_order_relaxed);
  if (used == kMaxStacks) throw std::bad_alloc();
  stacks[used] = {begin, end};
  stacks_used.store(used + 1, std::memory_order_release);
}

std::string take_reports() {
  std::vector<Report> taken(kMaxReports);
  unsigned more = 0;
  {
    const SpinLock lock(reports_lock);
    taken.resize(report_count);
    std::copy_n(reports, taken.size(), taken.begin());
    more = lost;
    report_count = lost = 0;
  }
  // One text for each pair of lines: the same race of other threads teaches nothing new.
  constexpr std::size_t kShown = 5;
  std::vector<std::string> seen;
  std::string text;
  for (const Report& report : taken) {
    const std::string pair = place_of(report.access[0].trace) + "|" + place_of(report.access[1].trace);
    if (std::find(seen.begin(), seen.end(), pair) != seen.end()) continue;
    seen.push_back(pair);
    if (seen.size() <= kShown) text += (text.empty() ? "" : "\n") + describe(report);
  }
  if (seen.size() > kShown) text += "\n" + std::to_string(seen.size() - kShown) + " more pairs of lines";
  if (more != 0) text += "\nand more accesses than are kept";
  return text;
}

}  // namespace kf::simt::race

namespace kf::simt {

void order_release(const void* address) { race::token_of(address).release(); }

void order_acquire(const void* address) { race::token_of(address).acquire(); }

// A fence orders what comes before it on one thread before what comes after a later fence on another. Which flag the
// second one has seen in between is not asked.
void order_fence() {
  static char fences;
  __tsan_acquire(&fences);
  __tsan_release(&fences);
}

}  // namespace kf::simt

// ThreadSanitizer asks before it prints: true keeps it silent.
namespace __tsan {
class ReportDesc;
__attribute__((visibility("default"))) bool OnReport(const ReportDesc* report, bool suppressed);
bool OnReport(const ReportDesc*, bool suppressed) {
  return kf::simt::race::take(__tsan_get_current_report()) || suppressed;
}
}  // namespace __tsan

// Kernels' accesses come through here first (of the compiler's calls, g++'s binary prefers these to those of its shared
// libtsan), so that those to a stack can be left out.
#ifndef __clang__
extern "C" {
#define KF_SIMT_ACCESS(kind, bytes)                                                                                \
  void __tsan_##kind##bytes##_pc(void* address, void* pc);                                                         \
  __attribute__((visibility("default"))) void __tsan_##kind##bytes(void* address) {                                \
    if (!kf::simt::Worker::on_own_stack(address)) __tsan_##kind##bytes##_pc(address, __builtin_return_address(0)); \
  }
#define KF_SIMT_BOTH(macro, ...) macro(read, __VA_ARGS__) macro(write, __VA_ARGS__)
KF_SIMT_BOTH(KF_SIMT_ACCESS, 1)
KF_SIMT_BOTH(KF_SIMT_ACCESS, 2)
KF_SIMT_BOTH(KF_SIMT_ACCESS, 4)
KF_SIMT_BOTH(KF_SIMT_ACCESS, 8)
KF_SIMT_BOTH(KF_SIMT_ACCESS, 16)
void __tsan_read_range_pc(void* address, unsigned long bytes, void* pc);
void __tsan_write_range_pc(void* address, unsigned long bytes, void* pc);
// Volatile words are to a GPU what relaxed atomics are: they order nothing, and do not race with each other. The kernel
// itself reads or writes right afterwards.
#define KF_SIMT_VOLATILE(bytes, bits)                                                                            \
  int##bits##_t __tsan_atomic##bits##_load(const volatile void* address, int order);                             \
  int##bits##_t __tsan_atomic##bits##_fetch_add(volatile void* address, int##bits##_t value, int order);         \
  __attribute__((visibility("default"))) void __tsan_volatile_read##bytes(void* address) {                       \
    if (!kf::simt::Worker::on_own_stack(address)) __tsan_atomic##bits##_load(address, __ATOMIC_RELAXED);         \
  }                                                                                                              \
  __attribute__((visibility("default"))) void __tsan_volatile_write##bytes(void* address) {                      \
    if (!kf::simt::Worker::on_own_stack(address)) __tsan_atomic##bits##_fetch_add(address, 0, __ATOMIC_RELAXED); \
  }
KF_SIMT_VOLATILE(1, 8)
KF_SIMT_VOLATILE(2, 16)
KF_SIMT_VOLATILE(4, 32)
KF_SIMT_VOLATILE(8, 64)
// What is at an odd address or larger than a word takes several instructions.
#define KF_SIMT_PLAIN(kind, prefix, bytes)                                                     \
  __attribute__((visibility("default"))) void __tsan_##prefix##_##kind##bytes(void* address) { \
    if (!kf::simt::Worker::on_own_stack(address))                                              \
      __tsan_##kind##_range_pc(address, bytes, __builtin_return_address(0));                   \
  }
KF_SIMT_BOTH(KF_SIMT_PLAIN, unaligned, 2)
KF_SIMT_BOTH(KF_SIMT_PLAIN, unaligned, 4)
KF_SIMT_BOTH(KF_SIMT_PLAIN, unaligned, 8)
KF_SIMT_BOTH(KF_SIMT_PLAIN, unaligned, 16)
KF_SIMT_BOTH(KF_SIMT_PLAIN, volatile, 16)
KF_SIMT_BOTH(KF_SIMT_PLAIN, unaligned_volatile, 2)
KF_SIMT_BOTH(KF_SIMT_PLAIN, unaligned_volatile, 4)
KF_SIMT_BOTH(KF_SIMT_PLAIN, unaligned_volatile, 8)
KF_SIMT_BOTH(KF_SIMT_PLAIN, unaligned_volatile, 16)
}
#endif

#endif
