// Writes down what the threads of some blocks of one launch do, in the order in which they run here: what each reads,
// writes and waits for. __init__.py makes it readable.
//
// KF_SIMT_TRACE names the file. KF_SIMT_TRACE_LAUNCH is the launch, from 1; KF_SIMT_TRACE_BLOCKS and
// KF_SIMT_TRACE_THREADS are "FIRST-LAST", numbered as their indices run, x first; KF_SIMT_TRACE_EVENTS is how many
// events there may be. With KF_SIMT_TRACE_END the process ends when they are written.
#pragma once

#include <set>

#include "../count/access_counter.h"

namespace kf::simt {

class Tracer {
 public:
  static const Observer kObserver;
  static void end() {}  // it was written when the launch ended

  // If this is a thread that is to be watched, and not the runtime at work for it.
  static Tracer* running();
  static Tracer& instance() { return lasting<Tracer>(); }
  Tracer();

  void enter(Address call);
  void leave();
  void access(Address pc, Kind kind, Reading reading, Address address, std::size_t size);
  void access_range(Address pc, Kind kind, Address address, std::size_t size) {
    access(pc, kind, Reading::kSure, address, size);
  }
  void compare(Address) {}
  void enter_basic_block(Address) {}

  void arguments(std::size_t count, const void* const* pointers, const char* const* types);
  void shared(const char* name, const void* address, std::size_t bytes, const char* type);

 private:
  struct Bounds {
    std::uint64_t first, last;
    bool hold(std::uint64_t n) const { return n >= first && n <= last; }
  };
  struct Array {
    Address begin;
    std::size_t bytes;
  };
  static Bounds bounds(const char* name);
  bool watches() const;
  bool watches_block() const;
  Array array_of(Address address, Space space) const;
  bool fresh(const char* kind);
  void settle();
  void wait(const char* name, CallSite site, const ShuffleLane* lane);
  void go_on(const std::vector<unsigned>& threads);
  void begin_launch(const LaunchConfig& config);
  void end_launch(std::exception_ptr error);
  void write(const std::string& error) const;

  std::recursive_mutex mutex_;  // blocks of a cooperative launch run on several OS threads
  const char* const path_;
  const std::uint64_t launch_wanted_, most_;
  const Bounds blocks_, threads_;
  std::uint64_t launch_ = 0;
  bool open_ = false;       // a launch is under way
  bool recording_ = false;  // and it is the one
  const KernelInfo* kernel_ = nullptr;
  std::string head_, arguments_, allocations_, shared_;
  std::vector<std::string> events_;       // without their ]
  std::map<Address, std::size_t> known_;  // allocations that were used
  std::set<std::string> shared_known_;
  std::uint64_t count_ = 0;
  std::map<std::vector<Address>, std::size_t> chains_;
  std::map<std::pair<std::uint64_t, unsigned>, std::vector<Address>> calls_;  // of each thread of each block
  std::map<std::pair<std::uint64_t, unsigned>, const ShuffleLane*> waiting_;
};

}  // namespace kf::simt
