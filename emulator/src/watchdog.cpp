// The watchdog: finds launches that can never end, and threads that keep the processor from others.
#include <sys/select.h>
#include <time.h>
#include <ucontext.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "scheduler.h"

#ifdef KF_SIMT_TSAN
extern "C" int __sigaction(int signal, const struct sigaction* action, struct sigaction* old);  // glibc's own
#endif

namespace kf::simt {

// ThreadSanitizer holds signals back until the program calls into it, which a thread that spins never does.
int set_signal_action(int signal, const struct sigaction* action, struct sigaction* before) {
#ifdef KF_SIMT_TSAN
  return __sigaction(signal, action, before);
#else
  return sigaction(signal, action, before);
#endif
}

void pause_for(double seconds) {
  const timespec pause{0, static_cast<long>(seconds * 1e9)};
  pselect(0, nullptr, nullptr, nullptr, &pause, nullptr);
}

double Worker::cpu_seconds() const {
  clockid_t clock;
  timespec t{};
  if (pthread_getcpuclockid(thread_, &clock) != 0 || clock_gettime(clock, &t) != 0) return 0;
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

namespace {

constexpr double kBusyWithoutExit = 10;  // times busy_seconds, in which some block must end

// Blocks that wait, perhaps for others that cannot begin.
std::string too_many(const Launch& launch, const Worker& poller) {
  const std::uint64_t left = launch.blocks - launch.next.load();
  std::string text = poller.describe_for_watchdog() + ": waits, as all threads do that have begun; " +
                     std::to_string(left) + " blocks have not, and there is no place for more at a time. ";
#ifdef KF_SIMT_TSAN
  text += "The race detector can follow " + std::to_string(race::kMaxResident) + " threads, and this grid has " +
          std::to_string(launch.blocks * launch.threads) + ". ";
#endif
  return text + "Where they wait for each other, use fewer or smaller blocks";
}

// With launch.mutex held.
void launch_error(Launch& launch, const std::string& what) {
  if (!launch.error) launch.error = std::make_exception_ptr(Error(what));
  launch.cancelled.store(true, std::memory_order_release);
  launch.grid_changed.notify_all();
}

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

void Worker::interrupt() {
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART;
  set_signal_action(kSignal, &action, nullptr);  // each time: other libraries of this kind have handlers of their own
  pthread_kill(thread_, kSignal);
}

// How long a thread computes is told in CPU time: a machine with other work to do, or one that is slow to start OS
// threads, makes no kernel endless.
Seen look_at(Launch& launch, double tick) {
  const std::lock_guard<std::mutex> lock(launch.mutex);
  if (launch.workers.empty()) return {};
  bool spinning = false;
  const Settings& settings = launch.settings;
  Launch::Watch& watch = launch.watch;
  bool all_wait = true, all_quiet = true;
  std::uint64_t events = 0;
  double computed = 0;  // by the busiest of the workers since the last look
  const Worker* poller = nullptr;
  for (Worker* worker : launch.workers) {
    Worker::Pulse& pulse = worker->pulse;
    const std::uint64_t switches = pulse.switches, idle = pulse.idle, now = pulse.events;
    const bool at_grid = pulse.waits_for_grid;
    const double cpu = worker->cpu_seconds();
    computed = std::max(computed, cpu - pulse.seen_cpu);
    pulse.seen_cpu = cpu;
    events += now;
    const bool switched = switches != pulse.seen_switches || at_grid;
    if (switched) pulse.cpu_at_switch = cpu;
    pulse.seen_switches = switches;
    if ((switched || pulse.spins) && idle >= 20) poller = worker;
    all_wait = all_wait && (at_grid || idle >= 20);
    if (now != pulse.seen_events) {
      pulse.spins = false;
      pulse.quiet = 0;
    } else if (worker->in_user_code()) {  // and not about to begin a block
      pulse.quiet += cpu - pulse.cpu_when_quiet;
    }
    pulse.cpu_when_quiet = cpu;
    all_quiet = all_quiet && (at_grid || idle >= 20 || pulse.quiet >= 0.25);
    spinning = spinning || pulse.spins;

    // One thread that computes and computes.
    if (now != pulse.seen_events || idle != 0 || at_grid) {
      pulse.seen_events = now;
      pulse.cpu_at_event = cpu;
    } else if (settings.busy_seconds > 0 && cpu - pulse.cpu_at_event > settings.busy_seconds) {
      worker->give_up = true;
    }
    const double stuck = cpu - pulse.cpu_at_switch;
    if (stuck > (pulse.spins ? 0 : 0.1) || (stuck > 0.03 && launch.cancelled)) worker->interrupt();
  }
  if (launch.cancelled) return {spinning, 0};

  // All wait for memory to change, and perhaps only a block that has not begun will change it. Threads that poll
  // without a call look like threads that compute for long, so there the number grows slowly. Nothing is decided
  // before the OS threads that were asked for have come.
  const bool all_here = launch.wanted == 0 && launch.joined > launch.helpers;
  watch.since_extra += tick;
  const bool more_blocks = launch.next.load() < launch.blocks;
  const bool add = more_blocks && all_here && (all_wait || (all_quiet && watch.since_extra > 0.25));
  if (add && launch.extra < kMaxExtra) {
    watch.since_extra = 0;
    const unsigned count = all_wait ? std::min<unsigned>(launch.extra + 1, kMaxExtra - launch.extra) : 1;
    launch.extra += count;
    watch.quiet = 0;
    return {spinning, count};
  }

  // Nothing has happened, and every thread that can run has looked many times whether anything has.
  if (events != watch.events || !all_here || !all_wait || poller == nullptr) {
    watch.events = events;
    watch.quiet = 0;
    for (Worker* worker : launch.workers) worker->pulse.idle_at_quiet = worker->pulse.idle;
  } else {
    watch.quiet += tick;
    bool looked = true;
    for (const Worker* worker : launch.workers) {
      const bool again = worker->pulse.waits_for_grid || worker->pulse.idle >= worker->pulse.idle_at_quiet + 20;
      looked = looked && again;
    }
    if (settings.spin_seconds > 0 && looked && watch.quiet >= settings.spin_seconds) {
      launch_error(launch, more_blocks ? too_many(launch, *poller) : poller->describe_endless());
    }
  }

  // Something happens, but no block ever ends.
  const std::uint64_t exits = launch.exits;
  watch.since_exit = exits == watch.exits ? watch.since_exit + computed : 0;
  watch.exits = exits;
  if (settings.busy_seconds > 0 && watch.since_exit > kBusyWithoutExit * settings.busy_seconds) {
    launch_error(launch, launch.workers.front()->describe_for_watchdog() + ": no block has ended in " +
                             std::to_string(watch.since_exit) + " s of CPU time (see set_watchdog in kf_simt.h)");
  }
  return {spinning, 0};
}

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
  if (at < code_begin || at >= code_end) return;
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

}  // namespace kf::simt
