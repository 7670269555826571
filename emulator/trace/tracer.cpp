#include "tracer.h"

#include <cstdio>
#include <cstring>

namespace kf::simt {
namespace {

// The last store of this OS thread, and its event. It happens after the call that announces it; where a structure is
// copied, only after that which announces the load.
struct Pending {
  Address address = 0;
  std::size_t size = 0, event = 0;
};
__thread Pending pending;

std::uint64_t number(const char* name, std::uint64_t fallback) {
  const char* const text = std::getenv(name);
  return text == nullptr ? fallback : std::strtoull(text, nullptr, 10);
}

std::string quoted(const char* text) {
  std::string out = "\"";
  for (; *text != '\0'; ++text) {
    if (*text == '"' || *text == '\\') out += '\\';
    out += static_cast<unsigned char>(*text) < ' ' ? ' ' : *text;
  }
  return out + '"';
}

std::string hex(Address value) {
  char text[32];
  std::snprintf(text, sizeof(text), "\"%zx\"", static_cast<std::size_t>(value));
  return text;
}

std::string bytes_at(Address address, std::size_t size) {
  std::string out = "\"";
  for (std::size_t i = 0; i < size; ++i) {
    char text[4];
    std::snprintf(text, sizeof(text), "%02x", reinterpret_cast<const unsigned char*>(address)[i]);
    out += text;
  }
  return out + '"';
}

std::string numbers(const dim3& d) {
  return "[" + std::to_string(d.x) + "," + std::to_string(d.y) + "," + std::to_string(d.z) + "]";
}

std::uint64_t block_number() { return blockIdx.x + std::uint64_t{gridDim.x} * (blockIdx.y + gridDim.y * blockIdx.z); }
unsigned thread_number() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }

}  // namespace

const Observer Tracer::kObserver{
    [](const LaunchConfig& config) { instance().begin_launch(config); },
    [](std::exception_ptr error) { instance().end_launch(error); },
    [] {},
    [] { instance().settle(); },
    [] {
      Tracer& self = instance();
      self.settle();
      const std::lock_guard<std::recursive_mutex> lock(self.mutex_);
      if (self.watches()) self.fresh("exit");
    },
    [](const char* name, CallSite site, const ShuffleLane* lane) { instance().wait(name, site, lane); },
    [](CallSite) {
      Tracer& self = instance();
      if (!self.recording_ || !self.watches_block()) return;
      std::vector<unsigned> all;
      for (unsigned t = 0; t < blockDim.x * blockDim.y * blockDim.z; ++t) all.push_back(t);
      self.go_on(all);
    },
    [](CallSite) {},
    [](unsigned warp, unsigned lanes) {
      std::vector<unsigned> all;
      for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
        all.push_back(warp * warpSize + static_cast<unsigned>(__builtin_ctz(rest)));
      }
      instance().go_on(all);
    },
};

Tracer::Tracer()
    : path_(std::getenv("KF_SIMT_TRACE")),
      launch_wanted_(number("KF_SIMT_TRACE_LAUNCH", 1)),
      most_(number("KF_SIMT_TRACE_EVENTS", 0)),
      blocks_(bounds("KF_SIMT_TRACE_BLOCKS")),
      threads_(bounds("KF_SIMT_TRACE_THREADS")) {}

Tracer::Bounds Tracer::bounds(const char* name) {
  const char* const text = std::getenv(name);
  if (text == nullptr) return {0, ~std::uint64_t{0}};
  char* end = nullptr;
  const std::uint64_t first = std::strtoull(text, &end, 10);
  return {first, *end == '-' ? std::strtoull(end + 1, nullptr, 10) : first};
}

bool Tracer::watches_block() const { return blocks_.hold(block_number()); }
bool Tracer::watches() const {
  return recording_ && entered_kernel != nullptr && watches_block() && threads_.hold(thread_number());
}

Tracer* Tracer::running() {
  const Worker* const worker = Worker::in_kernel();
  if (worker == nullptr || !worker->in_user_code()) return nullptr;
  Tracer& self = instance();
  return self.recording_ && self.watches_block() && self.threads_.hold(thread_number()) ? &self : nullptr;
}

void Tracer::begin_launch(const LaunchConfig& config) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (!open_) ++launch_;
  open_ = true;
  recording_ = path_ != nullptr && launch_ == launch_wanted_;
  head_ = "\"grid\": " + numbers(config.grid) + ", \"block\": " + numbers(config.block) +
          ", \"launch\": " + std::to_string(launch_);
}

void Tracer::end_launch(std::exception_ptr error) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  open_ = false;
  if (!recording_) return;
  recording_ = false;
  std::string what;
  if (error) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& known) {
      what = known.what();
    } catch (...) {
      what = "an exception";
    }
  }
  write(what);
  if (std::getenv("KF_SIMT_TRACE_END") != nullptr) std::_Exit(0);
}

void Tracer::arguments(std::size_t count, const void* const* pointers, const char* const* types) {
  arguments_.clear();
  for (std::size_t i = 0; i < count; ++i) {
    const Allocated all = allocation_of(pointers[i]);
    arguments_ += (i == 0 ? "" : ", ") + ("[" + hex(reinterpret_cast<Address>(pointers[i]))) + ", " +
                  hex(reinterpret_cast<Address>(all.begin)) + ", " + std::to_string(all.bytes) + ", " +
                  quoted(types[i]) + "]";
  }
}

void Tracer::shared(const char* name, const void* address, std::size_t bytes, const char* type) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (!watches()) return;
  if (name == nullptr) bytes = Worker::in_kernel()->launch().config.shared;
  const std::string one = "[" + std::to_string(block_number()) + ", " + quoted(name == nullptr ? "" : name) + ", " +
                          hex(reinterpret_cast<Address>(address)) + ", " + std::to_string(bytes) + ", " + quoted(type) +
                          "]";
  if (shared_known_.insert(one).second) shared_ += (shared_.empty() ? "" : ",\n") + one;
}

// Begins an event of the running thread. False where there are too many.
bool Tracer::fresh(const char* kind) {
  kernel_ = entered_kernel;
  if (++count_ > most_) return false;
  events_.push_back("[\"" + std::string(kind) + "\", " + std::to_string(block_number()) + ", " +
                    std::to_string(thread_number()));
  return true;
}

void Tracer::enter(Address call) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  settle();
  calls_[{block_number(), thread_number()}].push_back(call);
}

void Tracer::leave() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  settle();
  std::vector<Address>& calls = calls_[{block_number(), thread_number()}];
  if (!calls.empty()) calls.pop_back();
}

// Where the address can be read, and what it is a part of.
Tracer::Array Tracer::array_of(Address address, Space space) const {
  if (space == Space::kShared) return {address, 16};
  const Allocated all = allocation_of(reinterpret_cast<const void*>(address));
  return {reinterpret_cast<Address>(all.begin), all.bytes};
}

void Tracer::access(Address pc, Kind kind, Reading, Address address, std::size_t size) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  Worker& worker = *Worker::in_kernel();
  const Worker::Inside inside(worker);
  if (kind != Kind::kLoad) settle();
  if (entered_kernel == nullptr) return;
  const Space space = AccessCounter::mine().space_of(worker, address);
  if (space == Space::kNone) return;
  const Array array = array_of(address, space);
  const bool variable = space == Space::kConstant || (array.begin == 0 && lasting<Ranges>().holds(address));
  const bool known =
      variable || (array.begin != 0 && address + size <= array.begin + array.bytes) || space == Space::kShared;
  std::vector<Address> chain{pc};
  const std::vector<Address>& calls = calls_[{block_number(), thread_number()}];
  chain.insert(chain.end(), calls.rbegin(), calls.rend());
  const std::size_t id = chains_.emplace(chain, chains_.size()).first->second;
  if (!fresh(kKindNames[static_cast<int>(kind)])) return;
  events_.back() += ", " + std::to_string(id) + ", \"" +
                    (variable ? "variable" : kSpaceNames[static_cast<int>(space)]) + "\", " +
                    hex(variable ? address - lasting<Ranges>().base : address) + ", " + std::to_string(size) + ", " +
                    (known ? bytes_at(address, size) : "\"\"");
  if (kind != Kind::kLoad && kind != Kind::kAtomicLoad && known) pending = {address, size, events_.size() - 1};
  if (!variable && array.begin != 0 && space == Space::kGlobal && known_.emplace(array.begin, array.bytes).second) {
    allocations_ += (allocations_.empty() ? "[" : ", [") + hex(array.begin) + ", " + std::to_string(array.bytes) + "]";
  }
}

// What the last store has left.
void Tracer::settle() {
  if (pending.address == 0) return;
  const std::size_t at = pending.event;
  events_[at] += ", " + bytes_at(pending.address, pending.size);
  pending = {};
  // How often a thread polls depends on the machine, so that one look is recorded of several that find the same.
  if (at > 0 && at + 1 == events_.size() && events_[at] == events_[at - 1] && events_[at].rfind("[\"atomic", 0) == 0) {
    events_.pop_back();
    --count_;
  }
}

void Tracer::wait(const char* name, CallSite site, const ShuffleLane* lane) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  settle();
  if (!watches() || !fresh("wait")) return;
  events_.back() += ", " + quoted(name) + ", " + quoted(site.file) + ", " + std::to_string(site.line);
  if (lane != nullptr) {
    events_.back() += ", " + std::to_string(lane->source) + ", " +
                      bytes_at(reinterpret_cast<Address>(&lane->value), 8) + ", " +
                      quoted(lane->type == nullptr ? "" : lane->type);
    waiting_[{block_number(), thread_number()}] = lane;
  }
  // The chain of calls: a wait in a function of a header belongs to the line that calls it.
  events_.back() += ", [";
  const std::vector<Address>& calls = calls_[{block_number(), thread_number()}];
  for (auto call = calls.rbegin(); call != calls.rend(); ++call)
    events_.back() += (call == calls.rbegin() ? "" : ",") + hex(*call - 1 - lasting<Ranges>().base);
  events_.back() += "]";
}

void Tracer::go_on(const std::vector<unsigned>& threads) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (!recording_ || !watches_block()) return;
  std::string listed, values;
  for (const unsigned thread : threads) {
    if (!threads_.hold(thread)) continue;
    const auto lane = waiting_.find({block_number(), thread});
    listed += (listed.empty() ? "" : ",") + std::to_string(thread);
    if (lane == waiting_.end()) continue;
    values += (values.empty() ? "" : ", ") + bytes_at(reinterpret_cast<Address>(&lane->second->value), 8);
    waiting_.erase(lane);
  }
  if (listed.empty() || !fresh("go on")) return;
  events_.back() += ", [" + listed + "], [" + values + "]";
}

// Addresses of code are relative to where the program was loaded, and lie within the calling instruction.
void Tracer::write(const std::string& error) const {
  std::FILE* const file = std::fopen(path_, "w");
  if (file == nullptr) return std::perror(path_);
  const Address base = lasting<Ranges>().base;
  std::vector<const std::vector<Address>*> ordered(chains_.size());
  for (const auto& [chain, id] : chains_) ordered[id] = &chain;
  std::string chains;
  for (const std::vector<Address>* chain : ordered) {
    std::string one;
    for (const Address pc : *chain) one += (one.empty() ? "" : ",") + hex(pc - 1 - base);
    chains += (chains.empty() ? "[" : ",\n[") + one + "]";
  }
  std::string events;
  for (const std::string& event : events_) events += (events.empty() ? "" : ",\n") + event + "]";
  const std::string out =
      "{" + head_ + ", \"kernel\": " + quoted(kernel_ == nullptr ? "" : short_name(kernel_->signature).c_str()) +
      ", \"error\": " + quoted(error.c_str()) + ", \"count\": " + std::to_string(count_) + ",\n\"arguments\": [" +
      arguments_ + "], \"allocations\": [" + allocations_ + "],\n\"shared\": [" + shared_ + "],\n\"chains\": [" +
      chains + "],\n\"events\": [" + events + "]}\n";
  const bool whole = std::fwrite(out.data(), 1, out.size(), file) == out.size();
  if (std::fclose(file) != 0 || !whole) std::fprintf(stderr, "KF_SIMT_TRACE: cannot write %s\n", path_);
}

void kf_trace_arguments(std::size_t count, const void* const* pointers, const char* const* types) {
  Tracer::instance().arguments(count, pointers, types);
}

void kf_trace_shared(const char* name, const void* address, std::size_t bytes, const char* type) {
  Tracer::instance().shared(name, address, bytes, type);
}

}  // namespace kf::simt
