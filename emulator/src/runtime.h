// The inside of the emulation: launches, and the workers that run their blocks.
#pragma once

#define KF_SIMT_RUNTIME  // see device.h

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "fault.h"
#include "fiber.h"
#include "kf_simt.h"
#include "kf_simt/device.h"
#include "kf_simt/launch.h"
#include "race.h"

namespace kf::simt {

constexpr unsigned kMaxThreads = 1024;  // threads of a block
constexpr unsigned kMaxWarps = kMaxThreads / warpSize;
constexpr std::size_t kStaticLimit = 48 * 1024;
constexpr std::size_t kSharedLimit = 227 * 1024;  // static and dynamic together
constexpr unsigned kMultiprocessors = 16;
constexpr unsigned kThreadsPerMultiprocessor = 2048;
constexpr unsigned kBlocksPerMultiprocessor = 32;
constexpr std::size_t kSharedPerMultiprocessor = 228 * 1024;
constexpr unsigned kMaxClusterSize = 16, kMaxPortableClusterSize = 8;
constexpr unsigned kDynamicNumber = 1024;  // the address in PTX of the first byte of dynamic shared memory

// The blocks of this size that an SM would hold at the same time.
unsigned occupancy(unsigned threads, std::size_t shared);

struct Schedule {
  enum Kind { kForward, kReverse, kRandom } kind = kForward;
  std::uint64_t seed = 0;
};

struct Settings {
  Schedule schedule;
  unsigned threads = 1;
  unsigned last_blocks = 0;  // of a grid only these run; 0: all
  bool exited_is_error = true;
  bool undefined_is_error = true;
  bool branches_are_error = true;  // barriers in different branches
  double spin_seconds = 0.5;
  double busy_seconds = 60;
};
Settings current_settings();
unsigned cores();  // that this process may use

// Sleeps. ThreadSanitizer would look at all threads after each sleep of the C library.
void pause_for(double seconds);

// sigaction, past what a sanitizer makes of it.
int set_signal_action(int signal, const struct sigaction* action, struct sigaction* before);

struct Launch;

// What the watchdog finds: whether a thread of the launch seems to spin, and how many OS threads more its blocks need,
// which wait for others that have not begun.
struct Seen {
  bool spinning = false;
  unsigned more = 0;
};
Seen look_at(Launch& launch, double tick);
constexpr unsigned kMaxExtra = 1024;  // OS threads added to a launch

class Worker;

// Where a variable lies in static shared memory: from its beginning, and as PTX names the address.
struct StaticPlace {
  const SharedSlot* slot;
  std::size_t offset;
  unsigned number;
};

unsigned first_static_number(std::size_t dynamic_bytes);
StaticPlace next_static_place(const StaticPlace& before, const SharedSlot& slot);

// Blocks that are at work together and see each other's shared memory.
struct Cluster {
  std::vector<Worker*> members;  // by rank; guarded by the launch's mutex while they join
  unsigned joined = 0, left = 0;
  unsigned arrived = 0;                  // blocks whose threads have all arrived at the barrier or exited
  std::atomic<std::uint64_t> passed{0};  // barriers that all have reached
  const race::Token passes[2];           // for the race detector
};

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
  // Waits for the other blocks of the cluster to begin, or to end. Null or false if the launch has ended.
  Cluster* join_cluster(std::uint64_t number, unsigned rank, Worker* worker);
  bool leave_cluster(Cluster* cluster);
  void arrive_at_cluster(Cluster* cluster);
  // The same for every block of a cluster.
  StaticPlace static_place(const SharedSlot& slot);

  const LaunchConfig& config;
  void (*const invoke)(void*);
  void* const context;
  const Settings settings;
  const std::uint64_t blocks;
  const unsigned threads;  // of a block
  const dim3 cluster;      // in blocks
  const unsigned cluster_size;

  std::atomic<std::uint64_t> next{0};  // blocks given out
  std::atomic<bool> cancelled{false};
  std::atomic<bool> warned{false}, warned_of_branches{false};
  std::atomic<std::uint64_t> exits{0};  // blocks that have ended
  std::atomic<const KernelInfo*> kernel{nullptr};

  std::mutex mutex;  // guards what follows
  std::exception_ptr error;
  int refused = 0;
  std::vector<Worker*> workers;
  unsigned joined = 0;  // workers so far
  std::map<std::uint64_t, std::unique_ptr<Cluster>> clusters;
  std::vector<StaticPlace> static_places;
  dim3 kernel_cluster{0, 0, 0};  // found in the kernel when the launch had begun without it
  std::condition_variable grid_changed;
  std::uint64_t grid_arrived = 0, grid_finished = 0, grid_generation = 0;

  // For the race detector: what the caller did comes before all threads, what they do before the caller's next step.
  // Each of the first workers may keep so many of the detector's fibers, later ones only those of a block.
  unsigned first_workers = 0, fibers_each = 0;
  const race::Token begins, ends, grid_passes[2];

  // Of the pool, guarded by its mutex.
  unsigned wanted = 0;   // OS threads still asked for
  unsigned running = 0;  // OS threads at work, without the launching one
  unsigned helpers = 0;  // and those that have been
  unsigned extra = 0;

  // Of the watchdog.
  struct Watch {
    std::uint64_t events = ~std::uint64_t{0}, exits = 0;
    double quiet = 0, since_exit = 0, since_extra = 0;
  } watch;
};

// Runs blocks on one OS thread, which keeps it for its whole life.
class Worker : Pinned {
 public:
  Worker();
  ~Worker();
  static Worker& mine();       // of this OS thread, made when first asked for
  static Worker* in_kernel();  // the same if a kernel is running on this OS thread, else null
  static bool on_own_stack(const void* address);

  void work(Launch& launch);

  // For the running thread.
  int barrier(BarrierVote vote, int predicate, CallSite site);
  void barrier_of_grid(CallSite site);
  void named_barrier(unsigned id, unsigned threads, bool wait, CallSite site);
  void cluster_arrive(CallSite site);
  void cluster_wait(CallSite site);
  unsigned cluster_rank() const { return cluster_rank_; }
  Worker& member(unsigned rank, const char* what);
  unsigned shared_address(const void* generic);
  void* shared_pointer(unsigned address);
  bool in_arena(const void* generic) const;
  void* in_arena_of(const Worker& other, const void* own) const {
    return other.arena_ + (static_cast<const char*>(own) - arena_);
  }
  void warp_operation(WarpKind kind, unsigned mask, void* record, WarpWork work, const char* name, CallSite site);
  unsigned active_mask(CallSite site);
  void yield(const char* name = nullptr, CallSite site = {});
  // Ends the launch with an Error. The text is made by a function, because nothing is destroyed on the stack that is
  // left behind.
  template <class Text>
  [[noreturn]] void fail(Text text) {
    enter_runtime();
    record_error(current_, text());
    stop();
  }
  [[noreturn]] void refuse(int cuda_error);
  // What the compiler's checks have found, see undefined.cpp.
  void undefined_shift(void* record, std::uintptr_t left, std::uintptr_t right);
  void undefined_division(void* record, std::uintptr_t left, std::uintptr_t right);
  void undefined_cast(void* record, std::uintptr_t value);
  [[noreturn]] void restart_with(dim3 cluster);
  void* static_shared(SharedSlot& slot);
  void* dynamic_shared() { return dynamic_; }
  // Whether the address lies in the block's shared memory; *variable is null if it is dynamic.
  bool shared_variable(const void* address, const SharedSlot** variable) const;
  bool in_cluster(const void* address) const;  // in shared memory of any block of the cluster
  Launch& launch() { return *launch_; }
  std::uint64_t blocks_run() const { return blocks_run_; }
  // Does something that the running thread must not be interrupted in: it holds a lock, say.
  template <class Work>
  void undisturbed(Work work) {
    enter_runtime();
    work();
    leave_runtime();
  }

  // For the watchdog, from its thread.
  struct Pulse {
    std::atomic<std::uint64_t> switches{0};   // times that the scheduler ran
    std::atomic<std::uint64_t> events{0};     // exits, arrivals, and polls after a change
    std::atomic<std::uint64_t> idle{0};       // rounds over the block, one after the other, in which all threads polled
    std::atomic<bool> waits_for_grid{false};  // or for the other blocks of its cluster to begin or to end
    std::atomic<bool> spins{false};  // a thread was found in the same state again, and nothing has happened since
    // The watchdog's own notes.
    std::uint64_t seen_switches = 0, seen_events = 0, idle_at_quiet = 0;
    double seen_cpu = 0, cpu_at_switch = 0, cpu_at_event = 0, cpu_when_quiet = 0;
    double quiet = 0;  // CPU time in the kernel's own code without an event
  } pulse;
  std::string describe_for_watchdog() const;
  std::string describe_endless() const;
  double cpu_seconds() const;
  bool in_user_code() const { return in_user_code_.load(std::memory_order_relaxed); }
  void interrupt();                       // only while it is in launch.workers
  std::atomic<bool> give_up{false};       // set by the watchdog: the running thread must not be waited for any longer
  static constexpr int kSignal = SIGURG;  // ignored by default, and debuggers pass it on in silence
  static void handle_faults();            // the first call installs the handler, see signals.cpp

 private:
  friend class AccessCounter;  // count/access_counter.h
  friend class Tracer;         // trace/tracer.h
  struct WarpOperation {
    unsigned mask, arrived;
    WarpKind kind;
    WarpWork work;
    const char* name;
    CallSite site;  // of the lane that came first
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
  enum class Wait : unsigned char { kNone, kBarrier, kWarp, kActiveMask, kNamed };
  struct Place {
    const char* name;
    CallSite site;
  };
  class Inside;
  static void on_signal(int signal, siginfo_t* info, void* context);
  void map_arena();
  void unmap_arena();
  void make_spare_stacks();
  void drop_spare_stacks();
  static void on_fault(int signal, siginfo_t* info, void* context);
  static Worker* at_fault();
  static bool note_watched(const Fault& fault);
  bool take_fault(const Fault& fault, void* context);
  std::uintptr_t kernels_instruction(const Fault& fault) const;
  bool go_on_with(void (*function)(), void* context);
  static void after_fault();
  void end_with_fault();
  std::string text_of_fault() const;
  void say_fault() const;
  void warn_of_division(Division division);
  template <class Text, class Outcome>
  void undefined(void* record, Text text, Outcome outcome);
  struct NamedBarrier {
    unsigned expected, arrived;
    CallSite site;
    unsigned waiting[kMaxWarps];
    std::unique_ptr<race::Token> token;
  };

  void work_on_blocks();
  // Read by this OS thread's signal handler, and by the watchdog.
  void enter_runtime() { in_user_code_.store(false, std::memory_order_relaxed); }
  void leave_runtime() { in_user_code_.store(true, std::memory_order_relaxed); }

  void run_block(dim3 index);
  void begin_lone_cluster();
  void check_cluster_barrier();
  void pass_named_barrier(unsigned id);
  void prepare_block();
  static void fiber_main(void* worker);
  void execute();
  void finish_thread();
  int next_lane();
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
  bool seen_before(std::uint64_t hash);
  void note_event();
  void arrive_at_barrier(const char* name, CallSite site, BarrierVote vote, bool grid);
  void check_barrier();
  void complete_barrier();
  unsigned list_waiting(unsigned* threads) const;
  void leave_for_worker();
  bool complete(Warp& warp, unsigned operation);
  std::string at_other_barrier(const char* name, CallSite site) const;
  void warn_of_other_barrier(const char* name, CallSite site);
  [[noreturn]] void fail_mask(unsigned mask, const char* name, CallSite site);
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
#ifdef KF_SIMT_TSAN
  void forget_shared();
#endif
  void check_shared();
  void fill_zone(char* begin, std::size_t bytes);
  std::uint64_t random();

  Launch* launch_ = nullptr;
  pthread_t thread_;
  std::atomic<bool> in_user_code_{false};
  Fiber main_;
  race::Threads race_;
  unsigned fibers_kept_ = 0;
  std::vector<std::unique_ptr<StackSlab>> slabs_;
  std::vector<std::unique_ptr<Fiber[]>> fibers_;  // of each slab
  std::vector<Fiber*> free_;
  std::size_t stack_bytes_ = 0;
  char* spare_stacks_ = nullptr;    // for the handler of a fault, and for what follows it
  bool handler_has_stack_ = false;  // of ours
  Fault fault_;
  Division division_named_ = Division::kNone;  // by a check of the compiler's, before the processor stops

  // The block at work.
  dim3 block_index_;
  dim3 block_dim_{0, 0, 0};
  unsigned threads_ = 0, warps_ = 0;
  unsigned current_ = 0;
  unsigned exited_ = 0;
  unsigned current_warp_ = 0, lane_pass_ = 0, warp_pass_ = 0;
  bool restart_ = true, progress_ = false;
  volatile bool interrupted_ = false;  // a thread gave way that may have been computing
  volatile bool spun_ = false;         // one gave way that was in the same state as before
  static constexpr unsigned kSamples = 1024;
  std::uint64_t samples_[kSamples] = {};  // hashes of states in which threads were interrupted
  unsigned sample_count_ = 0;
  unsigned samples_of_turn_ = 0;
  std::uint64_t sampled_switch_ = 0;
  std::uint64_t random_ = 0;
  unsigned arrived_ = 0, votes_ = 0;
  int vote_result_ = 0;
  BarrierVote vote_ = BarrierVote::kNone;
  bool barrier_is_grid_ = false;
  unsigned grid_passed_ = 0;
  Place barrier_{};
  unsigned polling_ = 0;  // the thread that polled last
  Place polled_{};        // and what for, if that is known
  NamedBarrier named_[16];
  unsigned named_used_ = 0;  // which of them have been met in this block

  // The cluster of the block; null if it is alone, until it arrives at a barrier of the cluster.
  Cluster* cluster_ = nullptr;
  std::optional<Cluster> lone_cluster_;
  unsigned cluster_rank_ = 0;
  unsigned cluster_arrived_ = 0;              // threads
  std::uint64_t cluster_phase_[kMaxThreads];  // the barrier that each thread has arrived at
  std::uint64_t cluster_block_phase_ = 0;     // the barrier that the block is at
  Schedule::Kind order_ = Schedule::kForward;
  unsigned active_mask_[kMaxThreads];
  CallSite active_site_[kMaxThreads];
  Wait wait_[kMaxThreads];
  Fiber* fiber_of_[kMaxThreads + 1];  // the last stays null
  PollState polls_[kMaxThreads];      // of the threads that do not run
  uint3 index_of_[kMaxThreads];
  Warp warp_[kMaxWarps];

  // Shared memory.
  struct StaticVariable {
    const SharedSlot* slot;
    char* address;
    unsigned number;  // its address as PTX names it
  };
  struct StaticEntry {
    std::uint64_t block = 0;
    char* address = nullptr;
  };
  char* arena_ = nullptr;
  char* dynamic_ = nullptr;
  char* static_begin_ = nullptr;
  char* static_next_ = nullptr;
  unsigned number_next_ = 0;
  char* static_end_ = nullptr;
  std::size_t static_bytes_ = 0;
  std::size_t poisoned_for_ = ~std::size_t{0};
#ifdef KF_SIMT_TSAN
  bool in_cluster_before_ = false;  // the block before
  std::size_t dynamic_before_ = 0;  // what it had of dynamic shared memory
#endif
  std::uint64_t blocks_run_ = 0;
  std::vector<StaticEntry> static_table_;
  std::vector<StaticVariable> static_variables_;
};

std::string text_of(const CallSite& site);
std::string text_of(const uint3& v);
// The name and template arguments within a __PRETTY_FUNCTION__.
std::string short_name(const char* signature);
// The name alone, without allocating anything.
void copy_name(const char* signature, char* name, std::size_t size);

// A fault of a kernel for which CUDA has an error code.
class DeviceFault : public Error {
 public:
  DeviceFault(const std::string& text, int cuda_error_) : Error(text), cuda_error(cuda_error_) {}
  const int cuda_error;
};

// cudaGetLastError's value for this OS thread.
void set_last_error(int cuda_error);
// The error of a fault in a kernel, which all later calls give, as on a GPU; 0 without one, and always in libraries.
extern std::atomic<int> device_fault;
// Whether this OS thread is in a call of CUDA's.
bool in_runtime_call();

// What a stand-alone program does besides: src/program/spaces.cpp keeps the device's memory apart from the host's. Null
// in a library, whose kernels work on the host's memory.
struct Program {
  virtual void* map(std::size_t bytes, bool managed) = 0;  // null: take it from the heap
  virtual void unmap(void* memory) = 0;
  // Around what the runtime does with memory of the device's; whether the host has waited for all kernels.
  virtual void open(const void* memory, std::size_t bytes) = 0;
  virtual void close(bool synchronised) = 0;
  virtual void begin_launch(const LaunchConfig& config) = 0;
  virtual void end_launch() = 0;
  virtual bool take(const Fault& fault, bool by_device) = 0;                 // true: the access goes on
  virtual void copied(void* memory, std::size_t bytes, bool to_device) = 0;  // between the host and the device
  // What is at the address, if that is known; without allocating. It is the host's own one afterwards.
  virtual bool explain(Fault* fault, bool by_device, char* text, std::size_t size) = 0;
};
extern Program* program;

// What cudaMalloc and its like have given that holds the address; nothing where none does.
struct Allocated {
  const char* begin;
  std::size_t bytes;
};
Allocated allocation_of(const void* address);

// What a tool that watches the emulation is told. Called on the OS thread that runs the block.
struct Observer {
  void (*launch_begins)(const LaunchConfig& config);  // again if the kernel itself says that it has clusters
  void (*launch_ended)(std::exception_ptr error);
  void (*block_begins)();
  void (*block_ended)();   // blockIdx and entered_kernel are still those of the block
  void (*thread_ended)();  // the running one
  // The running thread waits, or would if it were not the last. A shuffle has its lane, which gets its value later.
  void (*waits)(const char* name, CallSite site, const ShuffleLane* lane);
  void (*barrier_passed)(CallSite site);
  void (*shuffled)(CallSite site);  // a warp, once for a shuffle or a reduction of its lanes
  // Those of the warp's threads that were in a warp operation go on.
  void (*warp_goes_on)(unsigned warp, unsigned lanes);
};

// Null without a tool. It is set before the first launch and then stays.
extern const Observer* observer;

struct ProbeResult {
  KernelInfo* info;
};
// Calls `call`, which must call a kernel, and returns the kernel's record without running the kernel.
KernelInfo* probe_kernel(void (*call)(void*), void* context);

}  // namespace kf::simt
