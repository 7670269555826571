// The scheduler: a worker runs block after block, and a block's threads in turn.
#include "scheduler.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstdlib>

namespace kf::simt {

__thread uint3 threadIdx, blockIdx;
__thread dim3 blockDim, gridDim;
__thread const KernelInfo* entered_kernel = nullptr;
__thread PollState poll_state;
__thread unsigned current_lane = 0;
__thread Worker* working = nullptr;
__thread const char *stack_begin = nullptr, *stack_end = nullptr;
const Observer* observer = nullptr;

namespace {

constexpr std::size_t kStacksPerSlab = 32;

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

}  // namespace

Worker::Worker() : thread_(pthread_self()) {
  fiber_adopt_thread(main_);
  stack_bytes_ = stack_size();
  map_arena();
  std::fill(std::begin(fiber_of_), std::end(fiber_of_), nullptr);
  make_spare_stacks();
}

Worker::~Worker() {
  unmap_arena();
  drop_spare_stacks();
}

bool Worker::on_own_stack(const void* address) {
  const char* const at = static_cast<const char*>(address);
  return at >= stack_begin && at < stack_end;
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
  if (__builtin_expect(observer != nullptr, 0)) observer->thread_ended();
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

// Leaves the running thread for good.
void Worker::stop() {
  enter_runtime();
  leave_for_worker();
  fiber_switch(*fiber_of_[current_], main_);
  std::abort();  // nothing resumes a thread of a launch that has ended
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

int Worker::pick_elsewhere() {
  if (launch_->cancelled.load(std::memory_order_relaxed)) return kStop;
  for (;;) {
    if (restart_) {
      restart_ = false;
      lane_pass_ = warp_pass_ = 0;
    } else {
      if (const int next = next_lane(); next != kStop) return next;
      Warp& warp = warp_[current_warp_];
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
    if (yielded) sched_yield();  // a warp that polls and votes makes events, too
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

void Worker::yield(const char* name, CallSite site) {
  const Inside inside(*this);
  polled_ = {name, site};
  if (poll_state.changed) note_event();
  poll_state.count = kPolls - 4;  // who has polled so often gives way sooner
  polling_ = current_;
  warp_[current_ / warpSize].yielded |= 1u << current_ % warpSize;
  suspend();
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

// What kernels call.

[[gnu::cold, gnu::noinline]] void not_in_a_kernel(const char* what) {
  throw Error(std::string(what) + " outside of a kernel");
}

bool on_device() { return working != nullptr; }

void poll_yield() {
  if (Worker* const worker = Worker::in_kernel()) worker->yield();
}

void poll_yield(const char* name, CallSite site) { running(name).yield(name, site); }

void __nanosleep(unsigned) { poll_yield(); }

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
