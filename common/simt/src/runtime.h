// The inside of the emulation: launches, and the workers that run their blocks.
#pragma once

#define KF_SIMT_RUNTIME  // see device.h

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fiber.h"
#include "kf_simt.h"
#include "kf_simt/device.h"
#include "kf_simt/launch.h"

namespace kf::simt {

constexpr unsigned kMaxThreads = 1024;  // threads of a block
constexpr unsigned kMaxWarps = kMaxThreads / warpSize;
constexpr std::size_t kStaticLimit = 48 * 1024;
constexpr std::size_t kDefaultDynamicLimit = 48 * 1024;
constexpr std::size_t kSharedLimit = 227 * 1024;  // static and dynamic together
constexpr unsigned kMultiprocessors = 16;
constexpr unsigned kThreadsPerMultiprocessor = 2048;
constexpr unsigned kBlocksPerMultiprocessor = 32;
constexpr std::size_t kSharedPerMultiprocessor = 228 * 1024;

// The blocks of this size that an SM would hold at the same time.
unsigned occupancy(unsigned threads, std::size_t shared);

struct Schedule {
  enum Kind { kForward, kReverse, kRandom } kind = kForward;
  std::uint64_t seed = 0;
};

struct Settings {
  Schedule schedule;
  unsigned threads = 1;
  bool exited_is_error = true;
  double spin_seconds = 1;
  double busy_seconds = 10;
};
Settings current_settings();

class Worker;

struct Launch {
  Launch(const LaunchConfig& config_, void (*invoke_)(void*), void* context_, const Settings& settings_);

  // The n-th block to run.
  dim3 block_at(std::uint64_t n) const;
  // Ends the launch. The first error of several is the one that the caller sees.
  void fail(std::exception_ptr error_);
  void refuse(int cuda_error);
  // Called by the last thread of a block to arrive at the barrier of the grid; waits for the other blocks. False if the
  // launch has ended, or can never get past this barrier; then *stuck is set.
  bool grid_barrier(bool* stuck);
  void block_finished();

  const LaunchConfig& config;
  void (*const invoke)(void*);
  void* const context;
  const Settings settings;
  const std::uint64_t blocks;
  const unsigned threads;  // of a block

  std::atomic<std::uint64_t> next{0};  // blocks given out
  std::atomic<bool> cancelled{false};
  std::atomic<bool> warned{false};
  std::atomic<std::uint64_t> exits{0};  // blocks that have ended
  std::atomic<const KernelInfo*> kernel{nullptr};

  std::mutex mutex;  // guards what follows
  std::exception_ptr error;
  int refused = 0;
  std::vector<Worker*> workers;
  std::condition_variable grid_changed;
  std::uint64_t grid_arrived = 0, grid_finished = 0, grid_generation = 0;

  // Of the pool, guarded by its mutex.
  unsigned wanted = 0;   // OS threads still asked for
  unsigned running = 0;  // OS threads at work, without the launching one
  unsigned extra = 0;

  // Of the watchdog.
  struct Watch {
    std::uint64_t events = ~std::uint64_t{0}, exits = 0;
    double quiet = 0, since_exit = 0, since_extra = 0;
    std::uintptr_t code_begin = 0, code_end = 0;  // where the kernel's module lies
  } watch;
};

// Runs blocks on one OS thread, which keeps it for its whole life.
class Worker {
 public:
  Worker();
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  static Worker& mine();       // of this OS thread, made when first asked for
  static Worker* in_kernel();  // the same if a kernel is running on this OS thread, else null

  void work(Launch& launch);

  // For the running thread.
  int barrier(Vote vote, int predicate, Site site);
  void barrier_of_grid(Site site);
  void warp_operation(WarpKind kind, unsigned mask, void* record, WarpWork work, const char* name, Site site);
  unsigned active_mask(Site site);
  void yield();
  // Ends the launch with an Error. The text is made by a function, because nothing is destroyed on the stack that is
  // left behind.
  template <class Text>
  [[noreturn]] void fail(Text text) {
    in_user_code_ = false;
    record_error(current_, text());
    stop();
  }
  [[noreturn]] void refuse(int cuda_error);
  void* static_shared(SharedSlot& slot);
  void* dynamic_shared() { return dynamic_; }
  Launch& launch() { return *launch_; }

  // For the watchdog, from its thread.
  struct Pulse {
    std::atomic<std::uint64_t> switches{0};  // times that the scheduler ran
    std::atomic<std::uint64_t> events{0};    // exits, arrivals, and polls after a change
    std::atomic<std::uint64_t> idle{0};      // rounds over the block, one after the other, in which all threads polled
    std::atomic<bool> waits_for_grid{false};
    // The watchdog's own notes.
    std::uint64_t seen_switches = 0, seen_events = 0, idle_at_quiet = 0;
    double stuck = 0, quiet = 0, cpu_at_event = 0;
  } pulse;
  std::string describe_for_watchdog() const;
  double cpu_seconds() const;
  void interrupt() { pthread_kill(thread_, kSignal); }  // only while it is in launch.workers
  std::atomic<bool> give_up{false};       // set by the watchdog: the running thread must not be waited for any longer
  static constexpr int kSignal = SIGURG;  // ignored by default, and debuggers pass it on in silence
  static void on_signal(int signal, siginfo_t* info, void* context);

 private:
  struct WarpOperation {
    unsigned mask, arrived;
    WarpKind kind;
    WarpWork work;
    const char* name;
    Site site;  // of the lane that came first
    void* records[warpSize];
  };
  struct Warp {
    unsigned lanes;    // those that exist
    unsigned ready;    // can run
    unsigned yielded;  // can run, but let others go first
    unsigned exited;
    unsigned asking;  // in __activemask
    unsigned open;    // operations begun
    WarpOperation operations[warpSize];
  };
  // What a thread that has begun and does not run waits for.
  enum class Wait : unsigned char { kNone, kBarrier, kWarp, kActiveMask };
  struct Place {
    const char* name;
    Site site;
  };
  class Inside;

  void run_block(dim3 index);
  void prepare_block();
  static void fiber_main(void* worker);
  void execute();
  void finish_thread();
  int pick();
  int pick_elsewhere();
  bool next_round();
  void resolve_active_mask(Warp& warp);
  unsigned choose(unsigned set);
  unsigned choose_random(unsigned set);
  void begin(unsigned thread);
  void suspend();
  [[noreturn]] void stop();
  void idle_round();
  void note_event();
  void arrive_at_barrier(const char* name, Site site, Vote vote, bool grid);
  void check_barrier();
  void complete_barrier();
  bool complete(Warp& warp, unsigned operation);
  [[noreturn]] void fail_at_other_barrier(const char* name, Site site);
  [[noreturn]] void fail_mask(unsigned mask, const char* name, Site site);
  [[noreturn]] void fail_other_operation(const char* name, Site site);
  Place place_of(unsigned thread) const;
  void report_deadlock();
  void record_error(unsigned thread, const std::string& what);
  std::string describe(unsigned thread) const;
  std::string name_thread(unsigned thread) const;
  std::string kernel_name() const;
  unsigned first_exited() const;
  unsigned first_waiting() const;
  void discard_fibers();
  Fiber* take_fiber();
  void begin_shared();
  void check_shared();
  void fill_zone(char* begin, std::size_t bytes);
  std::uint64_t random();

  Launch* launch_ = nullptr;
  pthread_t thread_;
  volatile bool in_user_code_ = false;
  Fiber main_;
  std::vector<std::unique_ptr<StackSlab>> slabs_;
  std::vector<std::unique_ptr<Fiber[]>> fibers_;  // of each slab
  std::vector<Fiber*> free_;
  std::size_t stack_bytes_ = 0;

  // The block at work.
  dim3 block_index_;
  dim3 block_dim_{0, 0, 0};
  unsigned threads_ = 0, warps_ = 0;
  unsigned current_ = 0;
  unsigned exited_ = 0;
  unsigned current_warp_ = 0, lane_pass_ = 0, warp_pass_ = 0;
  bool restart_ = true, progress_ = false;
  volatile bool interrupted_ = false;
  std::uint64_t random_ = 0;
  unsigned arrived_ = 0, votes_ = 0;
  int vote_result_ = 0;
  Vote vote_ = Vote::kNone;
  bool barrier_is_grid_ = false;
  Place barrier_{};
  unsigned polling_ = 0;  // the thread that polled last
  Schedule::Kind order_ = Schedule::kForward;
  unsigned active_mask_[kMaxThreads];
  Site active_site_[kMaxThreads];
  Wait wait_[kMaxThreads];
  Fiber* fiber_of_[kMaxThreads + 1];  // the last stays null
  uint3 index_of_[kMaxThreads];
  Warp warp_[kMaxWarps];

  // Shared memory.
  struct StaticVariable {
    const SharedSlot* slot;
    char* address;
  };
  struct StaticEntry {
    std::uint64_t block = 0;
    char* address = nullptr;
  };
  char* arena_ = nullptr;
  char* dynamic_ = nullptr;
  char* static_begin_ = nullptr;
  char* static_next_ = nullptr;
  char* static_end_ = nullptr;
  std::size_t static_bytes_ = 0;
  std::size_t poisoned_for_ = ~std::size_t{0};
  std::uint64_t blocks_run_ = 0;
  std::vector<StaticEntry> static_table_;
  std::vector<StaticVariable> static_variables_;
};

// The name and template arguments within a __PRETTY_FUNCTION__.
std::string short_name(const char* signature);

// cudaGetLastError's value for this OS thread.
void set_last_error(int cuda_error);

struct ProbeResult {
  KernelInfo* info;
};
// Calls `call`, which must call a kernel, and returns the kernel's record without running the kernel.
KernelInfo* probe_kernel(void (*call)(void*), void* context);

}  // namespace kf::simt
