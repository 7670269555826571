#include <link.h>
#include <sched.h>
#include <sys/select.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <numeric>
#include <set>
#include <thread>

#include "runtime.h"

#ifdef KF_SIMT_TSAN
extern "C" int __sigaction(int signal, const struct sigaction* action, struct sigaction* old);  // glibc's own
#endif

namespace kf::simt {
namespace {

std::atomic<std::uint64_t> launches{0};

// What has been launched since kf_simt_take_launched.
struct Launched {
  std::mutex mutex;
  std::set<const KernelInfo*> kernels;
};

Launched& launched() {
  static auto* const instance = make_lasting<Launched>();
  return *instance;
}

struct Overrides {
  std::mutex mutex;
  std::string schedule;
  int threads = 0;
  Exited exited = Exited::kDefault;
  double spin_seconds = -1, busy_seconds = -1;
};

Overrides& overrides() {
  static auto* const instance = make_lasting<Overrides>();  // still there when static objects are destroyed
  return *instance;
}

Schedule parse_schedule(const std::string& text) {
  if (text == "forward") return {Schedule::kForward, 0};
  if (text == "reverse") return {Schedule::kReverse, 0};
  const std::string prefix = "random:";
  if (text.compare(0, prefix.size(), prefix) == 0) {
    const std::string seed = text.substr(prefix.size());
    if (!seed.empty() && seed.size() <= 18 && seed.find_first_not_of("0123456789") == std::string::npos) {
      return {Schedule::kRandom, std::stoull(seed)};
    }
  }
  throw std::invalid_argument("KF_SIMT_SCHEDULE: `" + text + "` is none of forward, reverse, random:SEED");
}

unsigned cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return static_cast<unsigned>(std::max(1, CPU_COUNT(&set)));
  return std::max(1u, std::thread::hardware_concurrency());
}

unsigned number_from_environment(const char* name, unsigned most, unsigned fallback) {
  const char* const text = std::getenv(name);
  if (text == nullptr) return fallback;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (end == text || *end != '\0' || value < 1 || value > static_cast<long>(most)) {
    throw std::invalid_argument(std::string(name) + ": `" + text + "` is not a number from 1 to " +
                                std::to_string(most));
  }
  return static_cast<unsigned>(value);
}

double seconds_from_environment(const char* name, double fallback) {
  const char* const text = std::getenv(name);
  if (text == nullptr) return fallback;
  char* end = nullptr;
  const double value = std::strtod(text, &end);
  if (end == text || *end != '\0' || !(value >= 0)) {
    throw std::invalid_argument(std::string(name) + ": `" + text + "` is not a number of seconds");
  }
  return value;
}

// True for error, which is what a variable means that is not set.
bool error_or_warning(const char* name) {
  const char* const text = std::getenv(name);
  const std::string mode = text == nullptr ? "error" : text;
  if (mode != "error" && mode != "warn") {
    throw std::invalid_argument(std::string(name) + ": `" + mode + "` is none of error, warn");
  }
  return mode == "error";
}

constexpr double kTick = 0.01, kFastTick = 0.002;  // seconds; the fast one while a thread seems to spin
constexpr double kBusyWithoutExit = 10;            // times busy_seconds, in which some block must end
constexpr unsigned kMaxExtra = 1024;               // OS threads added to a launch whose blocks wait for each other

// The OS threads that help with launches, and the watchdog. They are kept from launch to launch.
class Pool {
 public:
  // A child of fork() has none of its parent's threads, so it begins with a pool of its own.
  static Pool& instance() {
    static std::mutex* const mutex = [] {
      pthread_atfork([] { creation().lock(); }, [] { creation().unlock(); },
                     [] {
                       current() = nullptr;
                       creation().unlock();
                     });
      return &creation();
    }();
    const std::lock_guard<std::mutex> lock(*mutex);
    if (current() == nullptr) current() = make_lasting<Pool>();
    return *current();
  }

  // Asks for `count` more OS threads to call work() on this launch's blocks.
  void offer(Launch& launch, unsigned count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    offer_locked(launch, count);
  }

  void watch(Launch& launch) {
    const std::lock_guard<std::mutex> lock(mutex_);
    watched_.push_back(&launch);
    if (!watchdog_) {
      start([this] { watchdog(); });
      watchdog_ = true;
    } else if (watchdog_sleeps_) {
      watchdog_wakes_.notify_one();
    }
  }

  // Takes the launch back and waits for the OS threads that are at work on it.
  void finish(Launch& launch) {
    std::unique_lock<std::mutex> lock(mutex_);
    launch.wanted = 0;
    offers_.erase(std::remove(offers_.begin(), offers_.end(), &launch), offers_.end());
    finished_.wait(lock, [&] { return launch.running == 0; });
    watched_.erase(std::find(watched_.begin(), watched_.end(), &launch));
  }

 private:
  static std::mutex& creation() {
    static auto* const mutex = make_lasting<std::mutex>();
    return *mutex;
  }
  static Pool*& current() {
    static Pool* pool = nullptr;
    return pool;
  }

  template <class Function>
  void start(Function function) {
    // Signals belong to the program's own threads; the watchdog's is sent to one thread by name, and faults are handled
    // where they happen.
    sigset_t all, before;
    sigfillset(&all);
    for (const int own : {Worker::kSignal, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&all, own);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      std::thread(function).detach();
    } catch (...) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void offer_locked(Launch& launch, unsigned count) {
    if (count == 0) return;
    launch.wanted += count;
    if (std::find(offers_.begin(), offers_.end(), &launch) == offers_.end()) offers_.push_back(&launch);
    unsigned needed = 0;
    for (const Launch* other : offers_) needed += other->wanted;
    for (; idle_ + starting_ < needed; ++starting_) start([this] { help(); });
    if (count == 1) {
      work_offered_.notify_one();
    } else {
      work_offered_.notify_all();
    }
  }

  void help() {
    std::unique_lock<std::mutex> lock(mutex_);
    --starting_;
    for (;;) {
      ++idle_;
      work_offered_.wait(lock, [&] { return !offers_.empty(); });
      --idle_;
      Launch& launch = *offers_.front();
      if (--launch.wanted == 0) offers_.pop_front();
      ++launch.running;
      ++launch.helpers;
      lock.unlock();
      try {
        Worker::mine().work(launch);
      } catch (...) {
        launch.fail(std::current_exception());
      }
      lock.lock();
      --launch.running;
      finished_.notify_all();
      if (idle_ >= keep_) return;
    }
  }

  void watchdog() {
    std::unique_lock<std::mutex> lock(mutex_);
    bool spinning = false;
    for (;;) {
      watchdog_sleeps_ = true;
      watchdog_wakes_.wait(lock, [&] { return !watched_.empty(); });
      watchdog_sleeps_ = false;
      lock.unlock();
      const double tick = spinning ? kFastTick : kTick;
      pause_for(tick);
      lock.lock();
      spinning = false;
      for (Launch* launch : watched_) spinning = look_at(*launch, tick) || spinning;
    }
  }

  // True if a thread of the launch seems to spin. How long a thread computes is told in CPU time: a machine with other
  // work to do, or one that is slow to start OS threads, makes no kernel endless.
  bool look_at(Launch& launch, double tick) {
    const std::lock_guard<std::mutex> lock(launch.mutex);
    if (launch.workers.empty()) return false;
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
      if (stuck > (pulse.spins ? 0 : 0.1) || (stuck > 0.03 && launch.cancelled)) interrupt(launch, *worker);
    }
    if (launch.cancelled) return spinning;

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
      offer_locked(launch, count);
      return spinning;
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
    return spinning;
  }

  // Blocks that wait, perhaps for others that cannot begin.
  static std::string too_many(const Launch& launch, const Worker& poller) {
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
  static void launch_error(Launch& launch, const std::string& what) {
    if (!launch.error) launch.error = std::make_exception_ptr(Error(what));
    launch.cancelled.store(true, std::memory_order_release);
    launch.grid_changed.notify_all();
  }

  static void interrupt(Launch& launch, Worker& worker) {
    if (launch.watch.code_end == 0) {
      find_code(launch);
      struct sigaction action{};
      action.sa_sigaction = Worker::on_signal;
      action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART;
      set_signal_action(Worker::kSignal, &action, nullptr);
    }
    worker.interrupt();
  }

  std::mutex mutex_;
  std::condition_variable work_offered_, finished_, watchdog_wakes_;
  std::deque<Launch*> offers_;
  std::vector<Launch*> watched_;
  unsigned idle_ = 0, starting_ = 0;
  const unsigned keep_ = std::max(8u, 2 * cores());
  bool watchdog_ = false, watchdog_sleeps_ = false;
};

// cudaSuccess, or why CUDA would not launch this: the codes of CUDA 13. Before, cudaErrorInvalidConfiguration (9) stood
// for most of them.
int validate(const LaunchConfig& config) {
  constexpr int kInvalidValue = 1, kCooperativeTooLarge = 720, kInvalidClusterSize = 912;
  const dim3 g = config.grid, b = config.block;
  if (g.x == 0 || g.y == 0 || g.z == 0 || b.x == 0 || b.y == 0 || b.z == 0) return kInvalidValue;
  if (g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535) return kInvalidValue;
  if (b.x > kMaxThreads || b.y > kMaxThreads || b.z > 64) return kInvalidValue;
  const std::uint64_t threads = std::uint64_t{b.x} * b.y * b.z;
  if (threads > kMaxThreads) return kInvalidValue;
  if (config.shared > kSharedLimit) return kInvalidValue;
  if (config.cluster.x != 0) {
    const dim3 c = config.cluster;
    const bool fits = c.y != 0 && c.z != 0 && std::uint64_t{c.x} * c.y * c.z <= kMaxClusterSize;
    if (!fits) return kInvalidClusterSize;
    if (g.x % c.x != 0 || g.y % c.y != 0 || g.z % c.z != 0) return kInvalidClusterSize;
  }
  if (config.cooperative) {
    const std::uint64_t resident = occupancy(static_cast<unsigned>(threads), config.shared) * kMultiprocessors;
    if (std::uint64_t{g.x} * g.y * g.z > resident) return kCooperativeTooLarge;
  }
  return 0;
}

}  // namespace

// ThreadSanitizer holds signals back until the program calls into it, which a thread that spins never does.
int set_signal_action(int signal, const struct sigaction* action, struct sigaction* before) {
#ifdef KF_SIMT_TSAN
  return __sigaction(signal, action, before);
#else
  return sigaction(signal, action, before);
#endif
}

// The executable segment that holds the launch's kernel.
void find_code(Launch& launch) {
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* data) {
        Launch& of = *static_cast<Launch*>(data);
        const auto target = reinterpret_cast<std::uintptr_t>(of.invoke);
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& segment = info->dlpi_phdr[i];
          const std::uintptr_t begin = info->dlpi_addr + segment.p_vaddr;
          if (segment.p_type != PT_LOAD || target < begin || target >= begin + segment.p_memsz) continue;
          of.watch.code_begin = begin;
          of.watch.code_end = begin + segment.p_memsz;
          return 1;
        }
        return 0;
      },
      &launch);
}

void pause_for(double seconds) {
  const timespec pause{0, static_cast<long>(seconds * 1e9)};
  pselect(0, nullptr, nullptr, nullptr, &pause, nullptr);
}

std::uint64_t launch_count() { return launches.load(); }

void set_schedule(const std::string& schedule) {
  if (!schedule.empty()) parse_schedule(schedule);
  const std::lock_guard<std::mutex> lock(overrides().mutex);
  overrides().schedule = schedule;
}

void set_threads(int threads) {
  const std::lock_guard<std::mutex> lock(overrides().mutex);
  overrides().threads = threads;
}

void set_exited_at_barrier(Exited mode) {
  const std::lock_guard<std::mutex> lock(overrides().mutex);
  overrides().exited = mode;
}

void set_watchdog(double spin_seconds, double busy_seconds) {
  const std::lock_guard<std::mutex> lock(overrides().mutex);
  overrides().spin_seconds = spin_seconds;
  overrides().busy_seconds = busy_seconds;
}

Settings current_settings() {
  Overrides& o = overrides();
  const std::lock_guard<std::mutex> lock(o.mutex);
  Settings settings;
  const char* const schedule = std::getenv("KF_SIMT_SCHEDULE");
  if (!o.schedule.empty()) {
    settings.schedule = parse_schedule(o.schedule);
  } else if (schedule != nullptr && *schedule != '\0') {
    settings.schedule = parse_schedule(schedule);
  }
  settings.threads =
      o.threads > 0 ? static_cast<unsigned>(o.threads) : number_from_environment("KF_SIMT_THREADS", 4096, cores());
  settings.last_blocks = number_from_environment("KF_SIMT_LAST_BLOCKS", 1u << 30, 0);
  settings.exited_is_error =
      o.exited != Exited::kDefault ? o.exited == Exited::kError : error_or_warning("KF_SIMT_EXITED");
  settings.undefined_is_error = error_or_warning("KF_SIMT_UNDEFINED");
  settings.branches_are_error = error_or_warning("KF_SIMT_BRANCHES");
  settings.spin_seconds = o.spin_seconds >= 0 ? o.spin_seconds : seconds_from_environment("KF_SIMT_SPIN_SECONDS", 0.5);
  settings.busy_seconds = o.busy_seconds >= 0 ? o.busy_seconds : seconds_from_environment("KF_SIMT_BUSY_SECONDS", 60);
  return settings;
}

unsigned occupancy(unsigned threads, std::size_t shared) {
  if (threads == 0 || threads > kMaxThreads) return 0;
  const unsigned whole_warps = (threads + warpSize - 1) / warpSize * warpSize;
  std::size_t blocks = std::min(kThreadsPerMultiprocessor / whole_warps, kBlocksPerMultiprocessor);
  constexpr std::size_t kReserved = 1024;  // of each block, by the system
  return static_cast<unsigned>(std::min(blocks, kSharedPerMultiprocessor / (shared + kReserved)));
}

Launch::Launch(const LaunchConfig& config_, void (*invoke_)(void*), void* context_, const Settings& settings_)
    : config(config_),
      invoke(invoke_),
      context(context_),
      settings(settings_),
      blocks(std::uint64_t{config_.grid.x} * config_.grid.y * config_.grid.z),
      threads(config_.block.x * config_.block.y * config_.block.z),
      cluster(config_.cluster.x == 0 ? dim3(1, 1, 1) : config_.cluster),
      cluster_size(cluster.x * cluster.y * cluster.z) {}

dim3 Launch::block_at(std::uint64_t n) const {
  const std::uint64_t clusters_of_grid = blocks / cluster_size;
  const auto rank = static_cast<unsigned>(n % cluster_size);
  n /= cluster_size;
  if (settings.schedule.kind == Schedule::kReverse) n = clusters_of_grid - 1 - n;
  if (settings.schedule.kind == Schedule::kRandom && clusters_of_grid > 1) {
    // n -> n·step + seed is a permutation when step and the number of clusters have no common factor.
    std::uint64_t step = (settings.schedule.seed * 2654435761u + 40503) % clusters_of_grid | 1;
    while (std::gcd(step, clusters_of_grid) != 1) ++step;
    n = static_cast<std::uint64_t>((static_cast<unsigned __int128>(n) * step + settings.schedule.seed) %
                                   clusters_of_grid);
  }
  const unsigned across = config.grid.x / cluster.x, down = config.grid.y / cluster.y;
  return {static_cast<unsigned>(n % across) * cluster.x + rank % cluster.x,
          static_cast<unsigned>(n / across % down) * cluster.y + rank / cluster.x % cluster.y,
          static_cast<unsigned>(n / across / down) * cluster.z + rank / cluster.x / cluster.y};
}

void Launch::fail(std::exception_ptr error_) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (!error) error = std::move(error_);
  cancelled.store(true, std::memory_order_release);
  grid_changed.notify_all();
}

void Launch::refuse(int cuda_error) {
  const std::lock_guard<std::mutex> lock(mutex);
  refused = cuda_error;
  cancelled.store(true, std::memory_order_release);
  grid_changed.notify_all();
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

Cluster* Launch::join_cluster(std::uint64_t number, unsigned rank, Worker* worker) {
  std::unique_lock<std::mutex> lock(mutex);
  std::unique_ptr<Cluster>& entry = clusters[number];
  if (!entry) {
    entry = std::make_unique<Cluster>();
    entry->members.resize(cluster_size);
  }
  Cluster* const joined = entry.get();
  joined->members[rank] = worker;
  ++joined->joined;
  grid_changed.notify_all();
  grid_changed.wait(lock, [&] { return joined->joined == cluster_size || cancelled.load(); });
  return cancelled.load() ? nullptr : joined;
}

bool Launch::leave_cluster(Cluster* left) {
  std::unique_lock<std::mutex> lock(mutex);
  ++left->left;
  if (left->arrived != 0 && left->arrived + left->left == cluster_size) {
    left->arrived = 0;
    left->passed.fetch_add(1);
  }
  grid_changed.notify_all();
  grid_changed.wait(lock, [&] { return left->left == cluster_size || cancelled.load(); });
  return !cancelled.load();
}

void Launch::arrive_at_cluster(Cluster* at) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (++at->arrived + at->left == cluster_size) {
    at->arrived = 0;
    at->passed.fetch_add(1);
  }
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

void Launch::block_finished() {
  exits.fetch_add(1, std::memory_order_relaxed);
  if (!config.cooperative) return;
  const std::lock_guard<std::mutex> lock(mutex);
  ++grid_finished;
  grid_changed.notify_all();
}

namespace {

class LaunchOfProgram {
 public:
  explicit LaunchOfProgram(const LaunchConfig& config) {
    if (program != nullptr) program->begin_launch(config);
  }
  ~LaunchOfProgram() {
    if (program != nullptr) program->end_launch();
  }
  LaunchOfProgram(const LaunchOfProgram&) = delete;
  LaunchOfProgram& operator=(const LaunchOfProgram&) = delete;
};

}  // namespace

void run(const LaunchConfig& config, void (*invoke)(void*), void* context) {
  if (Worker* const worker = Worker::in_kernel()) {
    worker->fail([&] {
      return std::string("launches the kernel ") + config.name + " (" + config.file + ":" +
             std::to_string(config.line) + "); kernels that launch kernels are not supported";
    });
  }
  if (const int error = validate(config)) {
    set_last_error(error);
    return;
  }
  if (device_fault != 0) {
    set_last_error(device_fault);
    return;
  }
  const Settings settings = current_settings();
  Launch launch(config, invoke, context, settings);
  const LaunchOfProgram of_program(config);
  if (settings.last_blocks != 0 && settings.last_blocks < launch.blocks && !config.cooperative) {
    launch.next = (launch.blocks - settings.last_blocks) / launch.cluster_size * launch.cluster_size;
  }
  // Blocks of a cluster wait for each other to begin, and they are given out one cluster after the other.
  std::uint64_t threads = config.cooperative
                              ? launch.blocks
                              : std::min<std::uint64_t>(launch.blocks, std::max(settings.threads, launch.cluster_size));
#ifdef KF_SIMT_TSAN
  const unsigned most = race::kMaxResident / launch.threads;  // blocks at a time
  if ((config.cooperative && threads > most) || launch.cluster_size > most) {
    throw Error("kernel " + std::string(config.name) + " (" + config.file + ":" + std::to_string(config.line) + "): " +
                std::to_string(threads * launch.threads) + " threads must be there at the same time, and the race " +
                "detector can follow " + std::to_string(race::kMaxResident) + "; use fewer blocks");
  }
  if (config.cooperative) {
    launch.fibers_each = launch.threads;
  } else {
    // The rest is for OS threads that may be added later: for all blocks, where their threads are not too many.
    threads = std::min<std::uint64_t>(threads, std::max({1u, most / 2, launch.cluster_size}));
    const std::uint64_t useful =
        std::min<std::uint64_t>(launch.blocks * launch.threads, std::max(race::kKeptEach, 2 * launch.threads));
    std::uint64_t each = std::min<std::uint64_t>(race::kKept / threads, useful);
    if (launch.blocks <= most) {
      each = std::min(each, (race::kMaxResident - (launch.blocks - threads) * launch.threads) / threads);
    }
    launch.fibers_each = static_cast<unsigned>(std::max<std::uint64_t>(each, launch.threads));
    launch.extra =
        kMaxExtra - static_cast<unsigned>((race::kMaxResident - threads * launch.fibers_each) / launch.threads);
  }
  launch.first_workers = static_cast<unsigned>(threads);
#endif
  Worker& self = Worker::mine();
  Pool& pool = Pool::instance();
  launch.begins.release();
  pool.watch(launch);
  try {
    pool.offer(launch, static_cast<unsigned>(threads - 1));
    self.work(launch);
  } catch (...) {
    launch.fail(std::current_exception());
  }
  pool.finish(launch);
  launch.ends.acquire();
  if (launch.kernel_cluster.x != 0) {  // only the kernel itself knew: nothing of it has run yet
    LaunchConfig again = config;
    again.cluster = launch.kernel_cluster;
    run(again, invoke, context);
    return;
  }
  if (launch.refused != 0) {
    set_last_error(launch.refused);
    return;
  }
  launches.fetch_add(1);
  {
    const std::lock_guard lock(launched().mutex);
    launched().kernels.insert(launch.kernel.load());
  }
#ifdef KF_SIMT_TSAN
  const std::string races = race::take_reports();
  if (!races.empty() && launch.error) std::fprintf(stderr, "%s\n", races.c_str());
  if (!races.empty() && !launch.error) {
    const KernelInfo* const kernel = launch.kernel.load();
    throw Error("kernel " + (kernel != nullptr ? short_name(kernel->signature) : config.name) + ": " + races);
  }
#endif
  if (!launch.error) return;
  try {
    std::rethrow_exception(launch.error);
  } catch (const DeviceFault& fault) {
    if (program == nullptr) throw;
    std::fflush(stdout);  // in order with what the program has printed
    std::fprintf(stderr, "%s\n", fault.what());
    device_fault = fault.cuda_error;
    set_last_error(fault.cuda_error);
  }
}

std::string short_name(const char* signature) {
  // "void ns::{anonymous}::k(const T*, int) [with T = float]" becomes "ns::k [with T = float]".
  std::string text = signature;
  for (const char* hidden : {"{anonymous}::", "(anonymous namespace)::"}) {
    for (std::size_t at; (at = text.find(hidden)) != std::string::npos;) text.erase(at, std::string(hidden).size());
  }
  const std::size_t open = text.find('(');
  if (open == std::string::npos) return text;
  int depth = 0;
  std::size_t begin = open;
  while (begin > 0 && (depth != 0 || text[begin - 1] != ' ')) {
    --begin;
    depth += text[begin] == '>' ? 1 : text[begin] == '<' ? -1 : 0;
  }
  std::string name = text.substr(begin, open - begin);
  const std::size_t with = text.rfind(" [");
  if (with != std::string::npos && with > open) name += text.substr(with);
  return name;
}

void copy_name(const char* signature, char* name, std::size_t size) {
  const char* end = signature;
  while (*end != '\0' && (*end != '(' || end[1] == 'a')) ++end;  // not that of "(anonymous namespace)"
  const char* begin = end;
  for (int depth = 0; begin > signature && (depth != 0 || begin[-1] != ' '); --begin) {
    depth += begin[-1] == '>' ? 1 : begin[-1] == '<' ? -1 : 0;
  }
  std::snprintf(name, size, "%.*s", static_cast<int>(end - begin), begin);
}

}  // namespace kf::simt

// Writes up to `room` addresses of kernels that have been launched since the last call, and forgets these. Returns how
// many there were. They lie beside the kernels, so that kernel_fusion/rung_counts.py learns which sources a rung's are
// of.
extern "C" __attribute__((visibility("default"))) std::size_t kf_simt_take_launched(const void** to, std::size_t room) {
  using kf::simt::launched;
  const std::lock_guard lock(launched().mutex);
  const std::size_t count = launched().kernels.size();
  for (auto each = launched().kernels.begin(); each != launched().kernels.end() && room > 0; ++each, --room) {
    *to++ = *each;
  }
  launched().kernels.clear();
  return count;
}
