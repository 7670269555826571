// Launches: what CUDA refuses, the OS threads that work on the blocks, and how it ends.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <numeric>
#include <set>
#include <thread>

#include "runtime.h"

namespace kf::simt {
namespace {

std::atomic<std::uint64_t> launches{0};

__thread bool probing = false;

// What has been launched since kf_simt_take_launched.
struct Launched {
  std::mutex mutex;
  std::set<const KernelInfo*> kernels;
};

constexpr double kTick = 0.01, kFastTick = 0.002;  // seconds; the fast one while a thread seems to spin

class Pool;
struct CurrentPool {
  std::mutex creation;
  Pool* pool = nullptr;
};

// The OS threads that help with launches, and the watchdog. They are kept from launch to launch.
class Pool {
 public:
  // A child of fork() has none of its parent's threads, so it begins with a pool of its own.
  static Pool& instance() {
    auto& current = lasting<CurrentPool>();
    [[maybe_unused]] static const int registered =
        pthread_atfork([] { lasting<CurrentPool>().creation.lock(); }, [] { lasting<CurrentPool>().creation.unlock(); },
                       [] {
                         lasting<CurrentPool>().pool = nullptr;
                         lasting<CurrentPool>().creation.unlock();
                       });
    const std::lock_guard<std::mutex> lock(current.creation);
    const race::Quiet quiet;
    if (current.pool == nullptr) current.pool = new Pool;
    return *current.pool;
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
      for (Launch* launch : watched_) {
        const Seen seen = look_at(*launch, tick);
        spinning = spinning || seen.spinning;
        offer_locked(*launch, seen.more);
      }
    }
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

std::uint64_t launch_count() { return launches.load(); }

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

void Launch::block_finished() {
  exits.fetch_add(1, std::memory_order_relaxed);
  if (!config.cooperative) return;
  const std::lock_guard<std::mutex> lock(mutex);
  ++grid_finished;
  grid_changed.notify_all();
}

void run(const LaunchConfig& config, void (*invoke)(void*), void* context) {
  if (Worker* const worker = Worker::in_kernel()) {
    worker->fail([&] {
      return std::string("launches the kernel ") + config.name + " (" + config.file + ":" +
             std::to_string(config.line) + "); kernels that launch kernels are not supported";
    });
  }
  if (const int error = validate(config)) return set_last_error(error);
  if (device_fault != 0) return set_last_error(device_fault);
  const Settings settings = current_settings();
  Launch launch(config, invoke, context, settings);
  if (program != nullptr) program->begin_launch(config);
  if (observer != nullptr) observer->launch_begins(config);
  const std::unique_ptr<Program, void (*)(Program*)> at_the_end(program, [](Program* of) { of->end_launch(); });
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
    return run(again, invoke, context);
  }
  if (observer != nullptr) observer->launch_ended(launch.error);
  if (launch.refused != 0) return set_last_error(launch.refused);
  launches.fetch_add(1);
  {
    const std::lock_guard lock(lasting<Launched>().mutex);
    lasting<Launched>().kernels.insert(launch.kernel.load());
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

}  // namespace kf::simt

// Writes up to `room` addresses of kernels that have been launched since the last call, and forgets these. Returns how
// many there were. They lie beside the kernels, so that kernel_fusion/rung_counts.py learns which sources a rung's are
// of.
extern "C" __attribute__((visibility("default"))) std::size_t kf_simt_take_launched(const void** to, std::size_t room) {
  auto& launched = kf::simt::lasting<kf::simt::Launched>();
  const std::lock_guard lock(launched.mutex);
  const std::size_t count = launched.kernels.size();
  for (auto each = launched.kernels.begin(); each != launched.kernels.end() && room > 0; ++each, --room) {
    *to++ = *each;
  }
  launched.kernels.clear();
  return count;
}
