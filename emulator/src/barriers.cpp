// Barriers of a block and of a grid, and those that PTX names.
#include <algorithm>
#include <cstdio>

#include "scheduler.h"

namespace kf::simt {

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

inline void Worker::arrive_at_barrier(const char* name, CallSite site, BarrierVote vote, bool grid) {
  if (arrived_ == 0) {
    barrier_ = {name, site};
    barrier_is_grid_ = grid;
    vote_ = vote;
  } else if (barrier_is_grid_ != grid || vote_ != vote || !same_site(barrier_.site, site)) {
    if (barrier_is_grid_ != grid || vote_ != vote || launch_->settings.branches_are_error) {
      fail([&] { return at_other_barrier(name, site); });
    }
    warn_of_other_barrier(name, site);
  }
  note_event();
  if (__builtin_expect(observer != nullptr, 0)) observer->waits(name, site, nullptr);
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

void Worker::warn_of_other_barrier(const char* name, CallSite site) {
  if (launch_->warned_of_branches.exchange(true)) return;
  const race::Quiet quiet;
  std::fprintf(stderr, "warning: %s: %s. CUDA forbids that, and GPUs take them for one barrier.\n",
               describe(current_).c_str(), at_other_barrier(name, site).c_str());
}

void Worker::named_barrier(unsigned id, unsigned threads, bool wait, CallSite site) {
  const char* const name = wait ? "bar.sync" : "bar.arrive";
  const auto call = [&] {
    return std::string("calls ") + name + " (" + text_of(site) + ") for barrier " + std::to_string(id) + " and " +
           std::to_string(threads) + " threads";
  };
  if (id >= 16 || threads == 0 || threads % warpSize != 0 || threads > warps_ * warpSize) {
    fail([&] { return call() + "; barriers are numbered from 0 to 15, and the threads are whole warps of the block"; });
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
      return call() + ", but another (" + text_of(barrier.site) + ") for " + std::to_string(barrier.expected);
    });
  }
  note_event();
  if (__builtin_expect(observer != nullptr, 0)) observer->waits(name, site, nullptr);
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

bool Launch::grid_barrier(bool* stuck) {
  std::unique_lock<std::mutex> lock(mutex);
  const std::uint64_t generation = grid_generation;
  ++grid_arrived;
  if (grid_arrived == blocks) {
    grid_arrived = 0;
    ++grid_generation;
    grid_changed.notify_all();
    return true;
  }
  grid_changed.wait(lock, [&] {
    return grid_generation != generation || cancelled.load() || grid_arrived + grid_finished == blocks;
  });
  if (grid_generation != generation) return true;
  *stuck = !cancelled.load();
  return false;
}

// What kernels call.

int block_barrier(BarrierVote vote, int predicate, CallSite site) {
  return running("__syncthreads").barrier(vote, predicate, site);
}

void grid_barrier(CallSite site) { running("grid.sync()").barrier_of_grid(site); }

void named_barrier(unsigned id, unsigned threads, bool wait, CallSite site) {
  running("bar.sync").named_barrier(id, threads, wait, site);
}

}  // namespace kf::simt
