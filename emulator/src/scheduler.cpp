#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "runtime.h"

#ifdef KF_SIMT_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace kf::simt {

__thread uint3 threadIdx, blockIdx;
__thread dim3 blockDim, gridDim;
__thread const KernelInfo* entered_kernel = nullptr;
__thread PollState poll_state;
__thread unsigned current_lane = 0;
const Observer* observer = nullptr;

namespace {

__thread Worker* working = nullptr;  // the worker of this OS thread while it runs a launch
__thread bool probing = false;
__thread const char *stack_begin = nullptr, *stack_end = nullptr;  // of the running thread; for the race detector

constexpr int kStop = -1;
constexpr std::size_t kStacksPerSlab = 32;
constexpr std::size_t kZone = 128;
constexpr std::size_t kDynamicAlign = 1024;
constexpr std::size_t kStaticSpace = 256 * 1024;               // 48 KB of variables, and the red zones between them
constexpr unsigned char kPoison = 0xff;                        // NaN in every floating-point format, -1 as an integer
constexpr std::uint64_t kZonePattern = 0xfffbfffbfffbfffbULL;  // NaN as well, but not what poison looks like

bool same_site(const CallSite& a, const CallSite& b) {
  return a.line == b.line && a.column == b.column && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

std::string text_of(const CallSite& site) { return std::string(site.file) + ":" + std::to_string(site.line); }

std::string text_of(const uint3& v) {
  return "(" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + ")";
}

std::size_t stack_size() {
#ifdef KF_SIMT_ASAN
  std::size_t kilobytes = 512;
#else
  std::size_t kilobytes = 128;
#endif
  if (const char* text = std::getenv("KF_SIMT_STACK_KB")) {
    const long value = std::strtol(text, nullptr, 10);
    if (value >= 16) kilobytes = static_cast<std::size_t>(value);
  }
  return kilobytes * 1024;
}

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

// While one of these lives, the OS thread is in the scheduler and must not be interrupted.
class Worker::Inside {
 public:
  explicit Inside(Worker& worker) : worker_(worker) { worker_.enter_runtime(); }
  ~Inside() { worker_.leave_runtime(); }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  Worker& worker_;
};

Worker::Worker() : thread_(pthread_self()) {
  fiber_adopt_thread(main_);
  stack_bytes_ = stack_size();
  const std::size_t bytes = kDynamicAlign + kSharedLimit + kDynamicAlign + kStaticSpace;
  const race::Quiet quiet;  // or this would be a write by this OS thread, which comes before no thread of a grid
  void* const memory =
      mmap(nullptr, bytes + kDynamicAlign, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  arena_ = static_cast<char*>(memory);
  dynamic_ = reinterpret_cast<char*>(round_up(reinterpret_cast<std::uintptr_t>(arena_) + kZone, kDynamicAlign));
  static_begin_ = dynamic_ + kSharedLimit + kDynamicAlign;
  static_end_ = static_begin_ + kStaticSpace;
  static_next_ = static_begin_;
#ifdef KF_SIMT_ASAN
  __asan_poison_memory_region(static_begin_, kStaticSpace);
#endif
  std::fill(std::begin(fiber_of_), std::end(fiber_of_), nullptr);
  make_spare_stacks();
}

bool Worker::on_own_stack(const void* address) {
  const char* const at = static_cast<const char*>(address);
  return at >= stack_begin && at < stack_end;
}

Worker::~Worker() {
  const std::size_t bytes = kDynamicAlign + kSharedLimit + kDynamicAlign + kStaticSpace + kDynamicAlign;
#ifdef KF_SIMT_ASAN
  __asan_unpoison_memory_region(arena_, bytes);
#endif
  munmap(arena_, bytes);
  drop_spare_stacks();
}

Worker& Worker::mine() {
  static thread_local std::unique_ptr<Worker> worker;
  if (!worker) worker = std::make_unique<Worker>();
  return *worker;
}

Worker* Worker::in_kernel() { return working; }

void Worker::work(Launch& launch) {
  launch_ = &launch;
  working = this;
  launch.begins.acquire();
  order_ = launch.settings.schedule.kind;
  cluster_rank_ = 0;
  blockDim = launch.config.block;
  gridDim = launch.config.grid;
  {
    const std::lock_guard<std::mutex> lock(launch.mutex);
    give_up = false;
    pulse.idle = 0;
    pulse.quiet = 0;
    pulse.seen_cpu = pulse.cpu_at_switch = pulse.cpu_at_event = pulse.cpu_when_quiet = cpu_seconds();
    launch.workers.push_back(this);
    fibers_kept_ = launch.joined++ < launch.first_workers ? launch.fibers_each : launch.threads;
  }
  try {
    work_on_blocks();
  } catch (...) {  // no memory, or more threads than the race detector can follow
    launch.fail(std::current_exception());
  }
  {
    const std::lock_guard<std::mutex> lock(launch.mutex);
    launch.workers.erase(std::find(launch.workers.begin(), launch.workers.end(), this));
  }
  race_.end_launch(launch.ends);
  entered_kernel = nullptr;
  working = nullptr;
  launch_ = nullptr;
}

void Worker::work_on_blocks() {
  Launch& launch = *launch_;
  prepare_block();
  for (;;) {
    if (launch.cancelled.load(std::memory_order_acquire)) break;
    const std::uint64_t n = launch.next.fetch_add(1, std::memory_order_relaxed);
    if (n >= launch.blocks) break;
    random_ = launch.settings.schedule.seed * 0x9e3779b97f4a7c15ULL + n + 1;
    if (launch.cluster_size > 1) {
      cluster_rank_ = static_cast<unsigned>(n % launch.cluster_size);
      begin_shared();
      pulse.waits_for_grid = true;
      cluster_ = launch.join_cluster(n / launch.cluster_size, cluster_rank_, this);
      pulse.waits_for_grid = false;
      if (cluster_ == nullptr) break;
    }
    run_block(launch.block_at(n));
    if (cluster_ != nullptr) {
      pulse.waits_for_grid = true;
      const bool all_left = launch.leave_cluster(cluster_);
      pulse.waits_for_grid = false;
      cluster_ = nullptr;
      if (!all_left) break;
    }
    launch.block_finished();
  }
}

void Worker::prepare_block() {
  threads_ = launch_->threads;
  warps_ = (threads_ + warpSize - 1) / warpSize;
  const dim3 dim = launch_->config.block;
  if (dim.x == block_dim_.x && dim.y == block_dim_.y && dim.z == block_dim_.z) return;
  block_dim_ = dim;
  unsigned i = 0;
  for (unsigned z = 0; z < dim.z; ++z) {
    for (unsigned y = 0; y < dim.y; ++y) {
      for (unsigned x = 0; x < dim.x; ++x) index_of_[i++] = {x, y, z};
    }
  }
}

void Worker::run_block(dim3 index) {
  block_index_ = index;
  blockIdx = index;
  entered_kernel = nullptr;
  exited_ = arrived_ = votes_ = grid_passed_ = 0;
  named_used_ = 0;
  cluster_arrived_ = 0;
  cluster_block_phase_ = 0;
  restart_ = true;
  progress_ = false;
  interrupted_ = false;
  for (unsigned w = 0; w < warps_; ++w) {
    Warp& warp = warp_[w];
    const unsigned lanes = std::min<unsigned>(warpSize, threads_ - w * warpSize);
    warp.lanes = lanes == warpSize ? ~0u : (1u << lanes) - 1;
    warp.ready = warp.lanes;
    warp.yielded = warp.exited = warp.asking = warp.open = 0;
  }
  if (cluster_ != nullptr) {
    std::fill_n(cluster_phase_, threads_, 0);
  } else {
    begin_shared();
  }
  race_.begin_block(threads_, index, index_of_, fibers_kept_, launch_->begins);
  if (__builtin_expect(observer != nullptr, 0)) observer->block_begins();

  const int first = pick();
  if (first != kStop) {
    begin(static_cast<unsigned>(first));
    fiber_switch(main_, *fiber_of_[current_]);
    enter_runtime();
  }
  if (__builtin_expect(observer != nullptr, 0)) observer->block_ended();

  if (exited_ == threads_) {
    check_shared();
    return;
  }
  if (!launch_->cancelled) report_deadlock();
  discard_fibers();
}

void Worker::fiber_main(void* argument) {
  fiber_entered();
  Worker& worker = *static_cast<Worker*>(argument);
  for (;;) {
    worker.execute();
    worker.finish_thread();
  }
}

void Worker::execute() {
  std::exception_ptr error;
  leave_runtime();
  try {
    launch_->invoke(launch_->context);
  } catch (...) {
    error = std::current_exception();
  }
  enter_runtime();
  if (error) launch_->fail(error);
}

// Goes on with another thread. If that one has not begun, it gets this stack; otherwise this stack is kept until
// another thread begins.
void Worker::finish_thread() {
  Fiber* const self = fiber_of_[current_];
  fiber_of_[current_] = nullptr;
  if (cluster_ != nullptr && cluster_phase_[current_] > cluster_block_phase_) --cluster_arrived_;
  Warp& warp = warp_[current_ / warpSize];
  warp.exited |= 1u << current_ % warpSize;
  ++exited_;
  note_event();
  for (unsigned i = 0; i < warp.open;) {
    if (!complete(warp, i)) ++i;
  }
  check_barrier();
  if (cluster_ != nullptr) check_cluster_barrier();

  const int next = pick();
  if (next != kStop && fiber_of_[next] == nullptr) {
    fiber_of_[next] = self;
    begin(static_cast<unsigned>(next));
    return;
  }
  free_.push_back(self);
  if (next == kStop) {
    leave_for_worker();
    fiber_switch(*self, main_);
  } else {
    begin(static_cast<unsigned>(next));
    fiber_switch(*self, *fiber_of_[current_]);
  }
}

inline void Worker::begin(unsigned thread) {
  current_ = thread;
  current_lane = thread % warpSize;
  threadIdx = index_of_[thread];
  poll_state.count = poll_state.changed = 0;
  if (fiber_of_[thread] == nullptr) fiber_of_[thread] = take_fiber();
  if (race::kOn) {
    race_.run(thread);
    stack_begin = fiber_of_[thread]->stack;
    stack_end = stack_begin + fiber_of_[thread]->size;
  }
  if (const Fiber* const after = fiber_of_[thread + 1]) fiber_prefetch(*after);  // most often the next to run
}

// The worker goes on, not another thread.
inline void Worker::leave_for_worker() {
  if (!race::kOn) return;
  race_.run_worker();
  stack_begin = stack_end = nullptr;
}

// Lets others run until this thread has been made ready and its turn has come.
inline void Worker::suspend() {
  const unsigned self = current_;
  Fiber* const fiber = fiber_of_[self];
  const int next = pick();
  Fiber* to = &main_;
  if (next != kStop) {
    begin(static_cast<unsigned>(next));
    to = fiber_of_[next];
    if (to == fiber) return;
  } else {
    leave_for_worker();
  }
  fiber_switch(*fiber, *to);
}

// Leaves the running thread for good.
void Worker::stop() {
  enter_runtime();
  leave_for_worker();
  fiber_switch(*fiber_of_[current_], main_);
  std::abort();  // nothing resumes a thread of a launch that has ended
}

inline unsigned Worker::choose(unsigned set) {
  if (order_ == Schedule::kForward) return static_cast<unsigned>(__builtin_ctz(set));
  if (order_ == Schedule::kReverse) return 31u - static_cast<unsigned>(__builtin_clz(set));
  return choose_random(set);
}

unsigned Worker::choose_random(unsigned set) {
  const auto turn = static_cast<unsigned>(random() % 32);
  const unsigned turned = turn == 0 ? set : set >> turn | set << (32 - turn);
  return (static_cast<unsigned>(__builtin_ctz(turned)) + turn) % 32;
}

std::uint64_t Worker::random() {
  random_ += 0x9e3779b97f4a7c15ULL;
  std::uint64_t z = random_;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ z >> 27) * 0x94d049bb133111ebULL;
  return z ^ z >> 31;
}

// The thread whose turn it is, or kStop when none can run or the launch has ended. The lanes of a warp take turns until
// none of them can go on; then the next warp has its turn. A warp's stacks so stay in the cache.
inline int Worker::pick() {
  pulse.switches.store(pulse.switches.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  if (!restart_ && lane_pass_ != 0 && !launch_->cancelled.load(std::memory_order_relaxed)) {
    const unsigned lane = choose(lane_pass_);
    const unsigned bit = 1u << lane;
    lane_pass_ &= ~bit;
    Warp& warp = warp_[current_warp_];
    if (warp.ready & bit) {
      warp.ready &= ~bit;
      return static_cast<int>(current_warp_ * warpSize + lane);
    }
  }
  return pick_elsewhere();
}

int Worker::pick_elsewhere() {
  if (launch_->cancelled.load(std::memory_order_relaxed)) return kStop;
  for (;;) {
    if (restart_) {
      restart_ = false;
      lane_pass_ = warp_pass_ = 0;
    } else {
      Warp& warp = warp_[current_warp_];
      while (lane_pass_ != 0) {
        const unsigned lane = choose(lane_pass_);
        const unsigned bit = 1u << lane;
        lane_pass_ &= ~bit;
        if (warp.ready & bit) {
          warp.ready &= ~bit;
          return static_cast<int>(current_warp_ * warpSize + lane);
        }
      }
      if (warp.asking != 0 && warp.ready == 0) resolve_active_mask(warp);
      const bool stay = order_ != Schedule::kRandom || random() % 2 == 0;
      if (warp.ready != 0 && stay) {
        lane_pass_ = warp.ready;
        continue;
      }
      if (warp.ready != 0) warp_pass_ |= 1u << current_warp_;
    }
    if (warp_pass_ == 0 && !next_round()) return kStop;
    current_warp_ = choose(warp_pass_);
    warp_pass_ &= ~(1u << current_warp_);
    lane_pass_ = warp_[current_warp_].ready;
  }
}

// Begins a round over the warps. False if no thread can run.
bool Worker::next_round() {
  const bool progress = progress_, interrupted = interrupted_, spun = spun_;
  progress_ = false;
  interrupted_ = false;
  spun_ = false;
  bool yielded = false;
  for (unsigned w = 0; w < warps_; ++w) {
    Warp& warp = warp_[w];
    yielded = yielded || warp.yielded != 0;
    warp.ready |= warp.yielded;
    warp.yielded = 0;
    if (warp.ready == 0 && warp.asking != 0) resolve_active_mask(warp);
    if (warp.ready != 0) warp_pass_ |= 1u << w;
  }
  if (progress) {
    pulse.idle.store(0, std::memory_order_relaxed);
  } else if (yielded && !interrupted) {
    if (spun) pulse.idle.store(pulse.idle.load(std::memory_order_relaxed) + 20, std::memory_order_relaxed);
    idle_round();
    if (launch_->cancelled.load(std::memory_order_relaxed)) return false;
  }
  return warp_pass_ != 0;
}

// All threads that can run wait for memory to change. Some other block must change it.
void Worker::idle_round() {
  const std::uint64_t rounds = pulse.idle.load(std::memory_order_relaxed) + 1;
  pulse.idle.store(rounds, std::memory_order_relaxed);
  if (rounds < 20) return;
  if (rounds < 2000) {
    sched_yield();
  } else {
    pause_for(200e-6);
  }
}

void Worker::resolve_active_mask(Warp& warp) {
  const unsigned base = static_cast<unsigned>(&warp - warp_) * warpSize;
  const unsigned leader = static_cast<unsigned>(__builtin_ctz(warp.asking));
  unsigned together = 0;
  for (unsigned lane = leader; lane < warpSize; ++lane) {
    const bool asks = warp.asking >> lane & 1;
    if (asks && same_site(active_site_[base + lane], active_site_[base + leader])) together |= 1u << lane;
  }
  for (unsigned lane = leader; lane < warpSize; ++lane) {
    if (together >> lane & 1) active_mask_[base + lane] = together;
  }
  warp.asking &= ~together;
  warp.ready |= together;
}

unsigned Worker::active_mask(CallSite site) {
  const Inside inside(*this);
  note_event();
  wait_[current_] = Wait::kActiveMask;
  active_site_[current_] = site;
  warp_[current_ / warpSize].asking |= 1u << current_ % warpSize;
  suspend();
  return active_mask_[current_];
}

inline void Worker::note_event() {
  progress_ = true;
  pulse.events.store(pulse.events.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

inline void Worker::arrive_at_barrier(const char* name, CallSite site, BarrierVote vote, bool grid) {
  if (arrived_ == 0) {
    barrier_ = {name, site};
    barrier_is_grid_ = grid;
    vote_ = vote;
  } else if (barrier_is_grid_ != grid || vote_ != vote || !same_site(barrier_.site, site)) {
    if (barrier_is_grid_ != grid || vote_ != vote || launch_->settings.branches_are_error) {
      fail_at_other_barrier(name, site);
    }
    warn_of_other_barrier(name, site);
  }
  note_event();
  wait_[current_] = Wait::kBarrier;
  ++arrived_;
}

inline int Worker::barrier(BarrierVote vote, int predicate, CallSite site) {
  const Inside inside(*this);
  arrive_at_barrier("__syncthreads", site, vote, false);
  votes_ += predicate != 0;
  check_barrier();
  suspend();
  return vote_result_;
}

void Worker::barrier_of_grid(CallSite site) {
  const Inside inside(*this);
  if (!launch_->config.cooperative)
    fail([&] { return "grid.sync() at " + text_of(site) + " in a launch that is not cooperative"; });
  arrive_at_barrier("grid.sync()", site, BarrierVote::kNone, true);
  check_barrier();
  suspend();
}

// After an arrival or an exit: are all at the barrier that can still come?
inline void Worker::check_barrier() {
  if (arrived_ + exited_ == threads_ && arrived_ != 0) complete_barrier();
}

void Worker::complete_barrier() {
  if (exited_ != 0) {
    const unsigned waiting = first_waiting();
    const std::string what = std::string("waits at ") + barrier_.name + " (" + text_of(barrier_.site) +
                             "), which thread " + name_thread(first_exited()) + " did not reach: it has exited";
    if (launch_->settings.exited_is_error) {
      record_error(waiting, what);
      return;  // pick() sees that the launch has ended
    }
    if (!launch_->warned.exchange(true)) {
      std::fprintf(stderr, "warning: %s: %s. CUDA counts only the threads that are left.\n", describe(waiting).c_str(),
                   what.c_str());
    }
  }
  unsigned waiting_threads[race::kOn ? kMaxThreads : 1];
  const unsigned waiting_count = race::kOn ? list_waiting(waiting_threads) : 0;
  if (barrier_is_grid_) {
    // A block may be at the next barrier before another has left this one, never at the one after: two tokens suffice.
    const race::Token& token = launch_->grid_passes[grid_passed_++ % 2];
    race_.release(waiting_threads, waiting_count, token);
    race_.run_worker();  // the lock of the launch is no meeting of threads
    bool stuck = false;
    pulse.waits_for_grid = true;
    const bool passed = launch_->grid_barrier(&stuck);
    pulse.waits_for_grid = false;
    race_.acquire(waiting_threads, waiting_count, token);
    race_.run(current_);
    if (stuck) {
      record_error(first_waiting(), "waits at grid.sync() (" + text_of(barrier_.site) +
                                        "), which another block did not reach: it has ended");
    }
    if (!passed) return;
  }
  if (race::kOn && !barrier_is_grid_) race_.order(waiting_threads, waiting_count, current_);
  vote_result_ = static_cast<int>(vote_ == BarrierVote::kCount ? votes_
                                  : vote_ == BarrierVote::kAnd ? votes_ == arrived_
                                                               : votes_ != 0);
  if (__builtin_expect(observer != nullptr, 0)) observer->barrier_passed(barrier_.site);
  arrived_ = votes_ = 0;
  for (unsigned w = 0; w < warps_; ++w) warp_[w].ready = warp_[w].lanes & ~warp_[w].exited;
  restart_ = true;
}

void Worker::named_barrier(unsigned id, unsigned threads, bool wait, CallSite site) {
  const char* const name = wait ? "bar.sync" : "bar.arrive";
  if (id >= 16 || threads == 0 || threads % warpSize != 0 || threads > warps_ * warpSize) {
    fail([&] {
      return std::string("calls ") + name + " (" + text_of(site) + ") for barrier " + std::to_string(id) + " and " +
             std::to_string(threads) +
             " threads; barriers are numbered from 0 to 15, and the threads are whole warps " + "of the block";
    });
  }
  const Inside inside(*this);
  NamedBarrier& barrier = named_[id];
  if (!(named_used_ >> id & 1)) {
    barrier.arrived = 0;
    named_used_ |= 1u << id;
  }
  if (barrier.arrived == 0) {
    const race::Quiet quiet;  // the fill may be memset, which the race detector sees wherever it is called from
    barrier.expected = threads;
    barrier.site = site;
    if (race::kOn) barrier.token = std::make_unique<race::Token>();
    std::fill_n(barrier.waiting, warps_, 0u);
  } else if (barrier.expected != threads) {
    fail([&] {
      return std::string("calls ") + name + " (" + text_of(site) + ") for barrier " + std::to_string(id) + " and " +
             std::to_string(threads) + " threads, but another (" + text_of(barrier.site) + ") for " +
             std::to_string(barrier.expected);
    });
  }
  note_event();
  if (race::kOn) barrier.token->release();
  ++barrier.arrived;
  // A warp counts as a whole, also where the block ends within it.
  if (current_ + 1 == threads_) barrier.arrived += warps_ * warpSize - threads_;
  if (wait) {
    wait_[current_] = Wait::kNamed;
    active_site_[current_] = site;
    barrier.waiting[current_ / warpSize] |= 1u << current_ % warpSize;
  }
  if (barrier.arrived == barrier.expected) pass_named_barrier(id);
  if (wait) suspend();
}

void Worker::pass_named_barrier(unsigned id) {
  NamedBarrier& barrier = named_[id];
  barrier.arrived = 0;
  for (unsigned w = 0; w < warps_; ++w) {
    for (unsigned rest = barrier.waiting[w]; race::kOn && rest != 0; rest &= rest - 1) {
      const unsigned thread = w * warpSize + static_cast<unsigned>(__builtin_ctz(rest));
      race_.acquire(&thread, 1, *barrier.token);
    }
    warp_[w].ready |= barrier.waiting[w];
  }
  if (race::kOn) race_.run(current_);
  restart_ = true;
}

void Worker::cluster_arrive(CallSite site) {
  const Inside inside(*this);
  if (cluster_ == nullptr) begin_lone_cluster();
  if (cluster_phase_[current_] > cluster_->passed.load(std::memory_order_acquire)) {
    fail([&] { return "arrives twice at the cluster's barrier without waiting in between (" + text_of(site) + ")"; });
  }
  note_event();
  cluster_->passes[cluster_phase_[current_]++ % 2].release();
  ++cluster_arrived_;
  check_cluster_barrier();
}

// A block that was launched in no cluster is one of its own: its barrier is another one of the block.
void Worker::begin_lone_cluster() {
  const race::Quiet quiet;  // what is written here is the runtime's, whichever thread comes first
  lone_cluster_.emplace().members = {this};
  std::fill_n(cluster_phase_, threads_, 0);
  cluster_ = &*lone_cluster_;
}

void Worker::check_cluster_barrier() {
  if (cluster_arrived_ == 0 || cluster_arrived_ + exited_ != threads_) return;
  cluster_arrived_ = 0;
  ++cluster_block_phase_;
  race_.run_worker();  // the lock of the launch is no meeting of threads
  launch_->arrive_at_cluster(cluster_);
  if (fiber_of_[current_] != nullptr) race_.run(current_);
}

void Worker::cluster_wait(CallSite site) {
  if (cluster_ == nullptr) return;  // nobody has arrived
  const std::uint64_t phase = cluster_phase_[current_];
  while (cluster_->passed.load(std::memory_order_acquire) < phase) yield("the cluster's barrier", site);
  note_event();
  if (phase != 0) cluster_->passes[(phase - 1) % 2].acquire();
}

Worker& Worker::member(unsigned rank, const char* what) {
  if (cluster_ == nullptr ? rank != 0 : rank >= launch_->cluster_size) {
    fail([&] {
      return std::string(what) + " of block " + std::to_string(rank) + " of its cluster, which has " +
             std::to_string(launch_->cluster_size);
    });
  }
  return cluster_ == nullptr ? *this : *cluster_->members[rank];
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

// The threads that have not exited, when they are all at the barrier.
unsigned Worker::list_waiting(unsigned* threads) const {
  unsigned count = 0;
  for (unsigned i = 0; i < threads_; ++i) {
    if (!(warp_[i / warpSize].exited >> i % warpSize & 1)) threads[count++] = i;
  }
  return count;
}

std::string Worker::at_other_barrier(const char* name, CallSite site) const {
  const bool one_line = site.line == barrier_.site.line && std::strcmp(site.file, barrier_.site.file) == 0;
  return std::string("is at ") + name + " (" + text_of(site) + "), but thread " + name_thread(first_waiting()) +
         " waits at " + barrier_.name + " (" + text_of(barrier_.site) + ")" +
         (one_line ? ", another one on that line" : "");
}

void Worker::fail_at_other_barrier(const char* name, CallSite site) {
  fail([&] { return at_other_barrier(name, site); });
}

void Worker::warn_of_other_barrier(const char* name, CallSite site) {
  if (launch_->warned_of_branches.exchange(true)) return;
  const race::Quiet quiet;
  std::fprintf(stderr, "warning: %s: %s. CUDA forbids that, and GPUs take them for one barrier.\n",
               describe(current_).c_str(), at_other_barrier(name, site).c_str());
}

inline void Worker::warp_operation(WarpKind kind, unsigned mask, void* record, WarpWork work, const char* name,
                                   CallSite site) {
  const Inside inside(*this);
  Warp& warp = warp_[current_ / warpSize];
  const unsigned lane = current_ % warpSize;
  const unsigned bit = 1u << lane;
  if (!(mask & bit)) fail_mask(mask, name, site);
  note_event();
  wait_[current_] = Wait::kWarp;
  unsigned i = 0;
  while (i < warp.open && !(warp.operations[i].mask == mask && warp.operations[i].kind == kind)) ++i;
  WarpOperation& operation = warp.operations[i];
  if (i == warp.open) {
    ++warp.open;
    operation.mask = mask;
    operation.arrived = 0;
    operation.kind = kind;
    operation.work = work;
    operation.name = name;
    operation.site = site;
  } else if (operation.work != work) {
    fail_other_operation(name, site);
  }
  operation.arrived |= bit;
  operation.records[lane] = record;
  if ((mask & warp.lanes & ~warp.exited & ~operation.arrived) == 0) complete(warp, i);
  suspend();
}

// Carries out an operation if it has all its lanes.
bool Worker::complete(Warp& warp, unsigned i) {
  WarpOperation& operation = warp.operations[i];
  if ((operation.mask & warp.lanes & ~warp.exited & ~operation.arrived) != 0) return false;
  const unsigned arrived = operation.arrived;
  if (race::kOn && operation.kind == WarpKind::kSync) {
    unsigned lanes[warpSize], count = 0;
    for (unsigned rest = arrived; rest != 0; rest &= rest - 1) {
      lanes[count++] = static_cast<unsigned>(&warp - warp_) * warpSize + static_cast<unsigned>(__builtin_ctz(rest));
    }
    race_.order(lanes, count, current_);
  }
  if (operation.work != nullptr) {
    for (unsigned rest = ~arrived; rest != 0; rest &= rest - 1) operation.records[__builtin_ctz(rest)] = nullptr;
    operation.work(operation.records, arrived);
  }
  if (__builtin_expect(observer != nullptr, 0)) observer->warp_goes_on(static_cast<unsigned>(&warp - warp_), arrived);
  if (i != --warp.open) operation = warp.operations[warp.open];
  warp.ready |= arrived;
  return true;
}

void Worker::fail_mask(unsigned mask, const char* name, CallSite site) {
  char text[16];
  std::snprintf(text, sizeof(text), "0x%08x", mask);
  fail([&] {
    return std::string("calls ") + name + " (" + text_of(site) + ") with the mask " + text +
           ", which leaves out its own lane " + std::to_string(current_lane);
  });
}

void Worker::fail_other_operation(const char* name, CallSite site) {
  fail([&] {
    return std::string("calls ") + name + " (" + text_of(site) + ") while a lane of its warp is in another operation";
  });
}

void Worker::yield() { yield(nullptr, {}); }

void Worker::yield(const char* name, CallSite site) {
  const Inside inside(*this);
  polled_ = {name, site};
  if (poll_state.changed) note_event();
  polling_ = current_;
  warp_[current_ / warpSize].yielded |= 1u << current_ % warpSize;
  suspend();
}

unsigned Worker::first_exited() const {
  unsigned w = 0;
  while (warp_[w].exited == 0) ++w;
  return w * warpSize + static_cast<unsigned>(__builtin_ctz(warp_[w].exited));
}

// The first thread that waits for others; threads that only gave way do not.
unsigned Worker::first_waiting() const {
  for (unsigned i = 0; i < threads_; ++i) {
    const Warp& warp = warp_[i / warpSize];
    const unsigned bit = 1u << i % warpSize;
    if (fiber_of_[i] != nullptr && i != current_ && ((warp.exited | warp.ready | warp.yielded) & bit) == 0) return i;
  }
  return current_;
}

Worker::Place Worker::place_of(unsigned thread) const {
  if (wait_[thread] == Wait::kActiveMask) return {"__activemask", active_site_[thread]};
  if (wait_[thread] == Wait::kNamed) return {"bar.sync", active_site_[thread]};
  if (wait_[thread] == Wait::kWarp) {
    const Warp& warp = warp_[thread / warpSize];
    for (unsigned i = 0; i < warp.open; ++i) {
      const WarpOperation& operation = warp.operations[i];
      if (operation.arrived >> thread % warpSize & 1) return {operation.name, operation.site};
    }
  }
  return barrier_;
}

// No thread can run, and not all have exited: each that is left waits for another.
void Worker::report_deadlock() {
  unsigned waiting = 0;
  while (fiber_of_[waiting] == nullptr) ++waiting;
  const Place place = place_of(waiting);
  std::string what = std::string("waits at ") + place.name + " (" + text_of(place.site) + ")";
  for (unsigned i = waiting + 1; i < threads_; ++i) {
    if (fiber_of_[i] == nullptr) continue;
    const Place other = place_of(i);
    if (std::strcmp(other.name, place.name) == 0 && same_site(other.site, place.site)) continue;
    what += ", while thread " + name_thread(i) + " waits at " + other.name + " (" + text_of(other.site) + ")";
    break;
  }
  record_error(waiting, what + ": neither can go on");
}

std::string Worker::name_thread(unsigned thread) const { return text_of(index_of_[thread]); }

std::string Worker::kernel_name() const {
  const KernelInfo* const kernel = launch_->kernel.load(std::memory_order_acquire);
  return kernel != nullptr ? short_name(kernel->signature) : launch_->config.name;
}

std::string Worker::describe(unsigned thread) const {
  return "kernel " + kernel_name() + ", block " + text_of(block_index_) + ", thread " + name_thread(thread);
}

std::string Worker::describe_for_watchdog() const { return describe(polling_); }

std::string Worker::describe_endless() const {
  if (polled_.name == nullptr) {
    return describe(polling_) + ": polls memory that no thread changes any more; the launch can never end";
  }
  return describe(polling_) + ": waits at " + polled_.name + " (" + text_of(polled_.site) +
         ") for what never comes; the launch can never end";
}

void Worker::record_error(unsigned thread, const std::string& what) {
  const race::Quiet quiet;
  launch_->fail(std::make_exception_ptr(Error(describe(thread) + ": " + what)));
}

void Worker::restart_with(dim3 cluster) {
  enter_runtime();
  {
    const std::lock_guard<std::mutex> lock(launch_->mutex);
    launch_->kernel_cluster = cluster;
  }
  launch_->refuse(0);
  stop();
}

void Worker::refuse(int cuda_error) {
  enter_runtime();
  launch_->refuse(cuda_error);
  stop();
}

// Abandons what runs on the stacks in use.
void Worker::discard_fibers() {
  for (unsigned i = 0; i < threads_; ++i) {
    if (fiber_of_[i] == nullptr) continue;
    fiber_reset(*fiber_of_[i], fiber_main, this);
    race_.release(&i, 1, launch_->ends);
    race_.run_worker();
    race_.replace(i);
    free_.push_back(fiber_of_[i]);
    fiber_of_[i] = nullptr;
  }
}

Fiber* Worker::take_fiber() {
  const race::Quiet quiet;
  if (free_.empty()) {
    slabs_.push_back(std::make_unique<StackSlab>(kStacksPerSlab, stack_bytes_));
    fibers_.push_back(std::make_unique<Fiber[]>(kStacksPerSlab));
    free_.reserve(slabs_.size() * kStacksPerSlab);  // for all, so that a thread that ends allocates nothing
    for (std::size_t i = kStacksPerSlab; i-- > 0;) {
      Fiber& fiber = fibers_.back()[i];
      fiber.stack = slabs_.back()->stack(i);
      fiber.size = slabs_.back()->usable();
      fiber.color = i * 128;
      fiber_reset(fiber, fiber_main, this);
      free_.push_back(&fiber);
    }
  }
  Fiber* const fiber = free_.back();
  free_.pop_back();
  return fiber;
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

double Worker::cpu_seconds() const {
  clockid_t clock;
  timespec t{};
  if (pthread_getcpuclockid(thread_, &clock) != 0 || clock_gettime(clock, &t) != 0) return 0;
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

namespace {

// Of a stack, too, with the red zones that AddressSanitizer keeps in it.
__attribute__((no_sanitize_address)) std::uint64_t hash_of(std::uint64_t hash, const void* memory, std::size_t bytes) {
  const char* const from = static_cast<const char*>(memory);
  for (std::size_t i = 0; i + sizeof(std::uint64_t) <= bytes; i += sizeof(std::uint64_t)) {
    std::uint64_t word;
    std::memcpy(&word, from + i, sizeof(word));
    hash = (hash ^ word) * 0x9e3779b97f4a7c15ULL;
    hash ^= hash >> 29;
  }
  return hash;
}

}  // namespace

bool Worker::seen_before(std::uint64_t hash) {
  const unsigned known = std::min(sample_count_, kSamples);
  if (std::find(samples_, samples_ + known, hash) != samples_ + known) return true;
  samples_[sample_count_++ % kSamples] = hash;
  return false;
}

// A thread that has not come to the scheduler for long is interrupted: its turn ends here, or the launch does. Only
// code of the kernel's own module is interrupted; a library might hold a lock. A thread whose registers and stack are
// what they were at an earlier interruption goes round in a loop that only another thread can end: it polls.
void Worker::on_signal(int, siginfo_t*, [[maybe_unused]] void* context) {
  Worker* const worker = working;
  if (worker == nullptr || !worker->in_user_code()) return;
#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))
  const auto* const machine = &static_cast<const ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  const auto at = static_cast<std::uintptr_t>(machine->gregs[REG_RIP]);
#else
  const auto at = static_cast<std::uintptr_t>(machine->pc);
#endif
  const Launch::Watch& watch = worker->launch_->watch;
  if (at < watch.code_begin || at >= watch.code_end) return;
  const int saved_errno = errno;
  if (worker->launch_->cancelled) worker->stop();
  if (worker->give_up) {
    worker->fail([&] {
      return "has run for " + std::to_string(worker->launch_->settings.busy_seconds) +
             " s without meeting a barrier, a warp operation or an atomic (see set_watchdog in kf_simt.h)";
    });
  }
#if defined(__x86_64__)
  const auto sp = static_cast<std::uintptr_t>(machine->gregs[REG_RSP]) - 128;  // with the red zone
  std::uint64_t hash = hash_of(worker->blocks_run_, machine->gregs, sizeof(machine->gregs));
  if (const auto* const vectors = machine->fpregs) hash = hash_of(hash, vectors->_xmm, sizeof(vectors->_xmm));
#else
  const auto sp = static_cast<std::uintptr_t>(machine->sp);
  std::uint64_t hash = hash_of(worker->blocks_run_, machine->regs, sizeof(machine->regs));
  hash = hash_of(hash ^ at, machine->__reserved, sizeof(machine->__reserved));
#endif
  const Fiber& fiber = *worker->fiber_of_[worker->current_];
  const auto top = reinterpret_cast<std::uintptr_t>(fiber.stack) + fiber.size - fiber.color;
  hash = hash_of(hash + worker->current_, reinterpret_cast<const void*>(sp), top - sp);
  const std::uint64_t turn = worker->pulse.switches.load(std::memory_order_relaxed);
  if (worker->sampled_switch_ != turn) worker->samples_of_turn_ = 0;
  worker->sampled_switch_ = turn;
  const bool spins = worker->seen_before(hash);
  if (!spins && ++worker->samples_of_turn_ < 5) return;
  if (spins) {
    worker->pulse.spins = true;
    worker->spun_ = true;
  } else {
    worker->interrupted_ = true;
  }
  worker->yield();
  errno = saved_errno;
#endif
}

// What kernels call.

bool on_device() { return working != nullptr; }

void enter_kernel_first(KernelInfo& info) {
  if (probing) throw ProbeResult{&info};
  Worker* const worker = Worker::in_kernel();
  if (worker == nullptr) throw Error(short_name(info.signature) + ": a kernel was called without a launch");
  Launch& launch = worker->launch();
  entered_kernel = &info;
  launch.kernel.store(&info, std::memory_order_release);
  const std::size_t dynamic = launch.config.shared;
  const bool too_much = dynamic > static_cast<std::size_t>(info.max_dynamic.load()) ||
                        dynamic + static_cast<std::size_t>(info.static_bytes.load()) > kSharedLimit;
  if (too_much || launch.threads > info.max_threads) worker->refuse(1);  // cudaErrorInvalidValue
  const dim3 asked = launch.config.cluster, own = info.cluster;
  if (own.x != 0 && asked.x == 0) worker->restart_with(own);
  const bool differs = own.x != 0 && (own.x != asked.x || own.y != asked.y || own.z != asked.z);
  const bool too_large = launch.cluster_size > kMaxPortableClusterSize && !info.large_cluster.load();
  if (differs || too_large) worker->refuse(912);  // cudaErrorInvalidClusterSize
}

KernelInfo* probe_kernel(void (*call)(void*), void* context) {
  const KernelInfo* const saved = entered_kernel;
  entered_kernel = nullptr;
  probing = true;
  KernelInfo* found = nullptr;
  try {
    call(context);
  } catch (const ProbeResult& result) {
    found = result.info;
  }
  probing = false;
  entered_kernel = saved;
  return found;
}

namespace {

[[noreturn, gnu::cold, gnu::noinline]] void not_in_a_kernel(const char* what) {
  throw Error(std::string(what) + " outside of a kernel");
}

inline Worker& running(const char* what) {
  if (__builtin_expect(working == nullptr, 0)) not_in_a_kernel(what);
  return *working;
}

}  // namespace

int block_barrier(BarrierVote vote, int predicate, CallSite site) {
  return running("__syncthreads").barrier(vote, predicate, site);
}

void grid_barrier(CallSite site) { running("grid.sync()").barrier_of_grid(site); }

void warp_operation(WarpKind kind, unsigned mask, void* record, WarpWork work, const char* name, CallSite site) {
  running(name).warp_operation(kind, mask, record, work, name, site);
}

unsigned __activemask(CallSite site) { return running("__activemask").active_mask(site); }

void poll_yield() {
  if (Worker* const worker = Worker::in_kernel()) worker->yield();
}

void poll_yield(const char* name, CallSite site) { running(name).yield(name, site); }

void named_barrier(unsigned id, unsigned threads, bool wait, CallSite site) {
  running("bar.sync").named_barrier(id, threads, wait, site);
}

unsigned kf_cluster_rank() { return running("a block's rank").cluster_rank(); }
unsigned kf_cluster_size() { return running("a cluster's size").launch().cluster_size; }
dim3 kf_cluster_dim() { return running("a cluster's size").launch().cluster; }
uint3 kf_cluster_index() {
  const dim3 dim = kf_cluster_dim();
  return {blockIdx.x / dim.x, blockIdx.y / dim.y, blockIdx.z / dim.z};
}
uint3 kf_cluster_block_index() {
  const dim3 dim = kf_cluster_dim();
  return {blockIdx.x % dim.x, blockIdx.y % dim.y, blockIdx.z % dim.z};
}
dim3 kf_grid_clusters() {
  const dim3 dim = kf_cluster_dim();
  return {gridDim.x / dim.x, gridDim.y / dim.y, gridDim.z / dim.z};
}
void cluster_arrive(CallSite site) { running("the cluster's barrier").cluster_arrive(site); }
void cluster_wait(CallSite site) { running("the cluster's barrier").cluster_wait(site); }

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

void __nanosleep(unsigned) { poll_yield(); }

void* static_shared_address(SharedSlot& slot) { return running("__shared__ memory").static_shared(slot); }

void* dynamic_shared_address() { return Worker::mine().dynamic_shared(); }

void kernel_error(const char* what, CallSite site) {
  running(what).fail([&] { return std::string(what) + " at " + text_of(site); });
}

void assert_failed(const char* expression, const char* file, unsigned line, const char* function) {
  Worker* const worker = Worker::in_kernel();
  if (worker != nullptr) {
    worker->fail([&] {
      return std::string("assertion `") + expression + "` failed at " +
             text_of(CallSite{file, static_cast<int>(line), 0});
    });
  }
  std::fprintf(stderr, "%s:%u: %s: Assertion `%s' failed.\n", file, line, function, expression);
  std::abort();
}

// The rate that cudaDeviceProp::clockRate gives: 10^9 cycles a second.
long long clock64() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<long long>(t.tv_sec) * 1000000000LL + t.tv_nsec;
}

}  // namespace kf::simt

// What cuda_runtime.h makes of clock().
extern "C" __attribute__((visibility("hidden"))) clock_t kf_simt_clock() {
  return kf::simt::on_device() ? static_cast<clock_t>(kf::simt::clock64()) : clock();
}

namespace kf::simt {

void bad_width(int width, const char* name, CallSite site) {
  running(name).fail([&] {
    return std::string("calls ") + name + " (" + text_of(site) + ") with the width " + std::to_string(width) +
           ", which is not a power of two up to 32";
  });
}

// What a lane reads from a lane that does not take part is undefined; here it is NaN.
namespace {
void exchange(void* const* records, unsigned present) {
  std::uint64_t values[warpSize];
  for (int i = 0; i < warpSize; ++i) {
    values[i] = present >> i & 1 ? static_cast<const ShuffleLane*>(records[i])->value : ~std::uint64_t{0};
  }
  for (int i = 0; i < warpSize; ++i) {
    if (!(present >> i & 1)) continue;
    auto* const to = static_cast<ShuffleLane*>(records[i]);
    to->value = values[to->source & 31];
  }
}
}  // namespace

void shuffle(ShuffleLane& lane, unsigned mask, const char* name, CallSite site) {
  running(name).warp_operation(WarpKind::kShuffle, mask, &lane, exchange, name, site);
}

unsigned ballot(unsigned mask, bool predicate, const char* name, unsigned* present, CallSite site) {
  struct Lane {
    bool predicate;
    unsigned set, present;
  } lane{predicate, 0, 0};
  warp_operation(
      WarpKind::kVote, mask, &lane,
      [](void* const* records, unsigned here) {
        unsigned set = 0;
        for (int i = 0; i < warpSize; ++i) {
          if (here >> i & 1 && static_cast<const Lane*>(records[i])->predicate) set |= 1u << i;
        }
        for (int i = 0; i < warpSize; ++i) {
          if (!(here >> i & 1)) continue;
          static_cast<Lane*>(records[i])->set = set;
          static_cast<Lane*>(records[i])->present = here;
        }
      },
      name, site);
  if (present != nullptr) *present = lane.present;
  return lane.set;
}

MatchLane match(unsigned mask, std::uint64_t value, const char* name, CallSite site) {
  MatchLane lane{value, 0, 0};
  warp_operation(
      WarpKind::kMatch, mask, &lane,
      [](void* const* records, unsigned present) {
        for (int i = 0; i < warpSize; ++i) {
          if (!(present >> i & 1)) continue;
          auto* const mine = static_cast<MatchLane*>(records[i]);
          mine->present = present;
          mine->same = 0;
          for (int j = 0; j < warpSize; ++j) {
            if (present >> j & 1 && static_cast<const MatchLane*>(records[j])->value == mine->value) {
              mine->same |= 1u << j;
            }
          }
        }
      },
      name, site);
  return lane;
}

}  // namespace kf::simt
