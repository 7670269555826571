// How a thread hands the processor to another, inline in whatever makes it wait.
#pragma once

#include <cstring>

#include "runtime.h"

namespace kf::simt {

// The worker of this OS thread while it runs a launch; and the running thread's stack, for the race detector.
[[gnu::visibility("hidden")]] extern __thread Worker* working;
[[gnu::visibility("hidden")]] extern __thread const char *stack_begin, *stack_end;

constexpr int kStop = -1;

[[noreturn]] void not_in_a_kernel(const char* what);

inline Worker& running(const char* what) {
  if (__builtin_expect(working == nullptr, 0)) not_in_a_kernel(what);
  return *working;
}

inline bool same_site(const CallSite& a, const CallSite& b) {
  return a.line == b.line && a.column == b.column && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

// While one of these lives, the OS thread is in the scheduler and must not be interrupted.
class Worker::Inside : Pinned {
 public:
  explicit Inside(Worker& worker) : worker_(worker) { worker_.enter_runtime(); }
  ~Inside() { worker_.leave_runtime(); }

 private:
  Worker& worker_;
};

inline void Worker::note_event() {
  progress_ = true;
  pulse.events.store(pulse.events.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

// After an arrival or an exit: are all at the barrier that can still come?
inline void Worker::check_barrier() {
  if (arrived_ + exited_ == threads_ && arrived_ != 0) complete_barrier();
}

inline void Worker::begin(unsigned thread) {
  polls_[current_] = poll_state;
  current_ = thread;
  current_lane = thread % warpSize;
  threadIdx = index_of_[thread];
  poll_state = polls_[thread];
  poll_state.changed = 0;
  if (fiber_of_[thread] == nullptr) {
    fiber_of_[thread] = take_fiber();
    poll_state = {};
  }
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

inline unsigned Worker::choose(unsigned set) {
  if (order_ == Schedule::kForward) return static_cast<unsigned>(__builtin_ctz(set));
  if (order_ == Schedule::kReverse) return 31u - static_cast<unsigned>(__builtin_clz(set));
  return choose_random(set);
}

// The next lane of the warp's turn that can run, or kStop.
inline int Worker::next_lane() {
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
  return kStop;
}

// The thread whose turn it is, or kStop when none can run or the launch has ended. The lanes of a warp take turns until
// none of them can go on; then the next warp has its turn. A warp's stacks so stay in the cache.
inline int Worker::pick() {
  pulse.switches.store(pulse.switches.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  if (!restart_ && !launch_->cancelled.load(std::memory_order_relaxed)) {
    if (const int next = next_lane(); next != kStop) return next;
  }
  return pick_elsewhere();
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

}  // namespace kf::simt
