// Counts the memory accesses of kernels as a GPU makes them: by warp, in sectors of global memory, in wavefronts of
// shared memory.
//
// Lanes do not run in lockstep: the accesses that one lane makes at a place in the program are numbered, and those of
// the 32 lanes with the same number are the warp's request. A place is a return address and the calls that led to it.
// The numbers start anew wherever the warp's lanes meet, so that a branch that some lanes did not take does not shift
// what comes after.
#pragma once

#include <link.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <string>
#include <tuple>
#include <unordered_map>

#include "../src/scheduler.h"

namespace kf::simt {

using Address = std::uintptr_t;

constexpr unsigned kBanks = 32, kBankBytes = 4, kSectorBytes = 32;
constexpr unsigned kAhead = 2048;  // requests of one place that may wait for lanes; a lane further ahead waits

enum class Kind : unsigned char { kLoad, kStore, kAtomic, kAtomicLoad, kBranch };
enum class Space : unsigned char { kGlobal, kShared, kConstant, kNone };
enum class Reading : unsigned char { kSure, kMembers, kWhole };  // of a structure; both are counted
inline const char* const kKindNames[] = {"load", "store", "atomic", "atomic load", "branch"};
inline const char* const kSpaceNames[] = {"global", "shared", "constant", ""};
inline const char* const kReadingNames[] = {"", "members", "whole"};

// A chain of calls within the kernel, as a tree; a thread is at one of its nodes.
struct Context {
  Context* parent;
  Address call;  // return address of the innermost call
  std::vector<std::unique_ptr<Context>> children;

  Context* child(Address at) {
    for (const auto& known : children) {
      if (known->call == at) return known.get();
    }
    children.push_back(std::make_unique<Context>(Context{this, at, {}}));
    return children.back().get();
  }
};

struct Place {
  const KernelInfo* kernel;
  Context* context;
  Address pc;
  Kind kind;
  Space space;
  Reading reading;
  unsigned size;  // bytes of one lane; 0 for a branch
  unsigned warp;

  bool operator==(const Place& other) const {
    return pc == other.pc && context == other.context && kernel == other.kernel && kind == other.kind &&
           space == other.space && reading == other.reading && size == other.size && warp == other.warp;
  }
  std::size_t hash() const {
    const std::uint64_t small = static_cast<unsigned>(kind) | static_cast<unsigned>(space) << 4 |
                                static_cast<unsigned>(reading) << 6 | size << 8 | warp << 16;
    std::uint64_t h = pc * 0x9e3779b97f4a7c15ULL ^ reinterpret_cast<Address>(context) * 0xbf58476d1ce4e5b9ULL;
    h ^= (small + reinterpret_cast<Address>(kernel)) * 0x94d049bb133111ebULL;
    return h ^ h >> 29;
  }
};

struct PlaceHash {
  std::size_t operator()(const Place& place) const { return place.hash(); }
};

struct Totals {
  std::uint64_t requests = 0;    // instructions of warps; for a branch, its executions by warps
  std::uint64_t lanes = 0;       // that took part
  std::uint64_t partial = 0;     // requests in which not all of the warp's lanes took part; divergent executions
  std::uint64_t sectors = 0;     // of global memory
  std::uint64_t wavefronts = 0;  // of shared memory
  std::uint64_t conflicts = 0;   // wavefronts more than the accesses' width needs
};

// What the lanes of a warp do at one place, the n-th time. A branch has no addresses.
struct Request {
  unsigned lanes = 0;     // that have come
  unsigned resolved = 0;  // branch: whose next block is known
  bool diverged = false;
  Address next = 0;  // branch: the block to which the first lane went; 0 if it was no branch after all
  Address address[warpSize];
};

struct Stream {
  Place place{};
  Totals* totals = nullptr;
  unsigned retired = 0;  // requests counted; open[first] has this number
  std::size_t first = 0;
  std::vector<Request> open;
  unsigned came[warpSize] = {};  // times that a lane has been here
  bool dirty = false;            // something happened since the lanes last met

  std::size_t waiting() const { return open.size() - first; }
};

// Distinct 32-byte sectors.
inline unsigned count_sectors(const Request& request, unsigned size) {
  Address seen[2 * warpSize];
  unsigned count = 0;
  for (unsigned rest = request.lanes; rest != 0; rest &= rest - 1) {
    const Address begin = request.address[__builtin_ctz(rest)];
    for (Address sector = begin / kSectorBytes; sector <= (begin + size - 1) / kSectorBytes; ++sector) {
      unsigned i = count;
      while (i > 0 && seen[i - 1] != sector) --i;
      if (i == 0) seen[count++] = sector;
    }
  }
  return count;
}

// Shared memory serves the whole warp at once, half of it where lanes take 8 bytes, a quarter where they take 16. In
// one wavefront each bank gives one word, to as many lanes as want it.
inline void count_wavefronts(const Request& request, unsigned size, Totals& totals) {
  const unsigned group = size <= 4 ? 32 : size == 8 ? 16 : 8;
  const unsigned words = size <= 4 ? 1 : size / kBankBytes;
  for (unsigned begin = 0; begin < warpSize; begin += group) {
    Address word_of[kBanks][warpSize];
    unsigned in_bank[kBanks] = {};
    unsigned most = 0;
    for (unsigned lane = begin; lane < begin + group; ++lane) {
      if (!(request.lanes >> lane & 1)) continue;
      for (unsigned w = 0; w < words; ++w) {
        const Address word = request.address[lane] / kBankBytes + w;
        const unsigned bank = word % kBanks;
        unsigned i = in_bank[bank];
        while (i > 0 && word_of[bank][i - 1] != word) --i;
        if (i == 0) word_of[bank][in_bank[bank]++] = word;
        most = std::max(most, in_bank[bank]);
      }
    }
    totals.wavefronts += most;
    totals.conflicts += most > 1 ? most - 1 : 0;
  }
}

// Where data lies that no instruction of a GPU would load from global memory.
struct Ranges {
  Address base = 0;  // where this program or library was loaded
  std::vector<std::pair<Address, Address>> constant;
  std::vector<std::pair<Address, Address>> loaded;  // all of its code and variables

  bool holds(Address address) const {
    return std::any_of(loaded.begin(), loaded.end(), [=](auto& r) { return address >= r.first && address < r.second; });
  }

  Ranges() {
    dl_iterate_phdr(
        [](dl_phdr_info* module, std::size_t, void* data) {
          auto& self = *static_cast<Ranges*>(data);
          const Address mine = reinterpret_cast<Address>(&kKindNames) - module->dlpi_addr;
          bool ours = false;
          for (int i = 0; i < module->dlpi_phnum; ++i) {
            const auto& s = module->dlpi_phdr[i];
            ours = ours || (s.p_type == PT_LOAD && mine >= s.p_vaddr && mine < s.p_vaddr + s.p_memsz);
          }
          for (int i = 0; ours && i < module->dlpi_phnum; ++i) {
            const auto& s = module->dlpi_phdr[i];
            const Address begin = module->dlpi_addr + s.p_vaddr;
            if (s.p_type == PT_LOAD) self.loaded.emplace_back(begin, begin + s.p_memsz);
            if ((s.p_type == PT_LOAD && !(s.p_flags & PF_W)) || s.p_type == PT_GNU_RELRO) {
              self.add(begin, s.p_memsz);
            }
          }
          if (ours) self.base = module->dlpi_addr;
          return ours ? 1 : 0;
        },
        this);
    // "OFFSET:SIZE,…" in hexadecimal: the variables that the source calls __constant__.
    const char* text = std::getenv("KF_SIMT_COUNT_CONSTANT");
    while (text != nullptr && *text != '\0') {
      char* end = nullptr;
      const Address offset = std::strtoull(text, &end, 16);
      const Address size = *end == ':' ? std::strtoull(end + 1, &end, 16) : 0;
      add(base + offset, size);
      text = *end == ',' ? end + 1 : nullptr;
    }
  }

  void add(Address begin, Address size) { constant.emplace_back(begin, begin + size); }
};

struct Shape {
  dim3 grid, block;
  std::size_t shared;
  bool operator<(const Shape& other) const {
    const auto key = [](const Shape& s) {
      return std::tie(s.grid.x, s.grid.y, s.grid.z, s.block.x, s.block.y, s.block.z, s.shared);
    };
    return key(*this) < key(other);
  }
};

struct KernelTotals {
  std::uint64_t blocks = 0;
  std::map<Shape, std::uint64_t> launches;
  // By file and line.
  std::map<std::pair<std::string, int>, std::uint64_t> barriers;  // passed by blocks
  std::map<std::pair<std::string, int>, std::uint64_t> shuffles;  // and reductions, of warps
};

// The counts of one OS thread. A friend of the worker whose threads it watches.
class AccessCounter {
 public:
  AccessCounter() {
    const auto hold = [this](const auto&... variables) {
      thread_locals_begin_ = std::min({reinterpret_cast<Address>(&variables)...});
      thread_locals_end_ = std::max({reinterpret_cast<Address>(&variables + 1)...});
    };
    hold(threadIdx, blockIdx, blockDim, gridDim, entered_kernel, poll_state, current_lane);
    all().add(this);
  }

  static AccessCounter& mine() {
    static __thread AccessCounter* counter = nullptr;
    if (__builtin_expect(counter == nullptr, 0)) counter = new AccessCounter;  // read when the process ends
    return *counter;
  }

  // For the callbacks: the counter, if this is a thread of a grid and not the runtime at work for it.
  static AccessCounter* running() {
    const Worker* const worker = Worker::in_kernel();
    return worker != nullptr && worker->in_user_code() ? &mine() : nullptr;
  }

  static const Observer kObserver;

  // At the process's end: writes the counts where the environment says so.
  static void end() {
    if (const char* const path = std::getenv("KF_SIMT_COUNT")) write(path);
  }

  void begin_block() {
    std::fill(std::begin(context_of_), std::end(context_of_), &root_);
    std::fill(std::begin(branch_of_), std::end(branch_of_), Branch{});
  }

  void end_block() {
    retire_all_warps();
    if (entered_kernel == nullptr) return;
    KernelTotals& totals = kernels_[entered_kernel];
    ++totals.blocks;
    if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0) {
      ++totals.launches[Shape{gridDim, blockDim, Worker::in_kernel()->launch().config.shared}];
    }
  }

  void pass_barrier(CallSite site) {
    retire_all_warps();
    ++kernels_[entered_kernel].barriers[{site.file, site.line}];
  }

  void shuffle(CallSite site) { ++kernels_[entered_kernel].shuffles[{site.file, site.line}]; }

  // If all lanes that are left have met, the numbering of their accesses starts anew.
  void meet(unsigned warp, unsigned lanes) {
    const Worker::Warp& of = Worker::in_kernel()->warp_[warp];
    if ((of.lanes & ~of.exited & ~lanes) == 0) retire_all(warp);
  }

  void enter(Address call) {
    const Worker::Inside inside(*Worker::in_kernel());
    Context*& context = context_of_[thread()];
    context = context->child(call);
  }

  void leave() {
    Context*& context = context_of_[thread()];
    if (context->parent != nullptr) context = context->parent;
  }

  void access(Address pc, Kind kind, Reading reading, Address address, unsigned size) {
    Worker& worker = *Worker::in_kernel();
    const Worker::Inside inside(worker);
    const Space space = space_of(worker, address);
    if (space == Space::kNone || space == Space::kConstant || entered_kernel == nullptr) return;
    Stream& stream = stream_at(pc, kind, space, reading, size);
    Request* const request = arrive(stream);
    const unsigned bit = 1u << current_lane;
    if (request == nullptr) {  // long after the others
      Request alone;
      alone.lanes = bit;
      alone.address[current_lane] = address;
      count(stream, alone);
      return;
    }
    request->lanes |= bit;
    request->address[current_lane] = address;
    if (request->lanes == worker.warp_[stream.place.warp].lanes) retire_complete(stream, worker);
    if (far_ahead(stream)) wait_for_lanes(stream, worker);
  }

  // The compiler reports a structure in one piece if it is larger than 16 bytes, or no power of two, or less aligned
  // than its size would need. In the last case its members are smaller, of 4 bytes most often. But where the emulation
  // itself moves memory for an instruction, it is one access. Who reads the counts knows whose code it was.
  void access_range(Address pc, Kind kind, Address address, std::size_t size) {
    // The largest piece that an instruction can move at once, up to 16 bytes: a power of two that divides address and
    // size.
    const std::size_t all = address | size | 16;
    const auto widest = static_cast<unsigned>(all & ~(all - 1));
    const auto pieces = [&](unsigned piece, Reading reading) {
      for (std::size_t at = 0; at < size; at += piece) access(pc, kind, reading, address + at, piece);
    };
    if (widest != size || size == 1) return pieces(widest, Reading::kSure);
    pieces(size > 4 ? 4 : widest / 2, Reading::kMembers);
    pieces(widest, Reading::kWhole);
  }

  // A comparison may be what the next branch depends on.
  void compare(Address pc) {
    Worker& worker = *Worker::in_kernel();
    const Worker::Inside inside(worker);
    resolve(worker, 0);
    if (entered_kernel == nullptr) return;
    Stream& stream = stream_at(pc, Kind::kBranch, Space::kNone, Reading::kSure, 0);
    Request* const request = arrive(stream);
    if (request == nullptr) return;
    request->lanes |= 1u << current_lane;
    branch_of_[thread()] = {&stream, stream.came[current_lane] - 1};
    if (far_ahead(stream)) wait_for_lanes(stream, worker);
  }

  void enter_basic_block(Address pc) {
    Worker& worker = *Worker::in_kernel();
    const Worker::Inside inside(worker);
    resolve(worker, pc);
  }

  static unsigned thread() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }

  Space space_of(const Worker& worker, Address address) const {
    const auto within = [address](const void* begin, const void* end) {
      return address >= reinterpret_cast<Address>(begin) && address < reinterpret_cast<Address>(end);
    };
    if (worker.in_arena(reinterpret_cast<const void*>(address))) return Space::kShared;
    const Fiber& fiber = *worker.fiber_of_[thread()];
    if (within(fiber.stack, fiber.stack + fiber.size)) return Space::kNone;
    if (address >= thread_locals_begin_ && address < thread_locals_end_) return Space::kNone;
    for (const auto& slab : worker.slabs_) {  // another thread's stack
      if (within(slab->begin(), slab->end())) return Space::kNone;
    }
    for (const auto& range : constants_.constant) {
      if (address >= range.first && address < range.second) return Space::kConstant;
    }
    return Space::kGlobal;
  }

  static void write(const char* path);

  // Forgets what has been counted. No launch may be under way.
  static void clear() {
    const std::lock_guard<std::mutex> lock(all().mutex);
    for (AccessCounter* const counter : all().counters) {
      for (auto& [place, totals] : counter->totals_) totals = {};  // streams point to them
      counter->kernels_.clear();
    }
  }

 private:
  struct Branch {
    Stream* stream = nullptr;
    unsigned number = 0;
  };

  struct Registry {
    std::mutex mutex;
    std::vector<AccessCounter*> counters;
    void add(AccessCounter* counter) {
      const std::lock_guard<std::mutex> lock(mutex);
      counters.push_back(counter);
    }
  };
  static Registry& all() { return lasting<Registry>(); }

  Stream& stream_at(Address pc, Kind kind, Space space, Reading reading, unsigned size) {
    const unsigned thread_number = thread();
    const unsigned warp = thread_number / warpSize;
    const Place place{entered_kernel, context_of_[thread_number], pc, kind, space, reading, size, warp};
    Stream*& recent = recent_[place.hash() % kRecent];
    if (recent == nullptr || !(recent->place == place)) {
      std::unique_ptr<Stream>& slot = streams_[place];
      if (slot == nullptr) {
        slot = std::make_unique<Stream>();
        slot->place = place;
        Place of_all_warps = place;
        of_all_warps.warp = 0;
        slot->totals = &totals_[of_all_warps];
      }
      recent = slot.get();
    }
    if (!recent->dirty) {
      recent->dirty = true;
      dirty_[warp].push_back(recent);
    }
    return *recent;
  }

  // The request that the running lane takes part in; null if it has been counted already.
  static Request* arrive(Stream& stream) {
    const unsigned number = stream.came[current_lane]++;
    if (number < stream.retired) return nullptr;
    const std::size_t index = stream.first + (number - stream.retired);
    if (index >= stream.open.size()) stream.open.resize(index + 1);
    return &stream.open[index];
  }

  // The running lane has come to a basic block: where its last comparison led. 0: nowhere, it was no branch.
  void resolve(Worker& worker, Address next) {
    Branch& branch = branch_of_[thread()];
    Stream* const stream = branch.stream;
    if (stream == nullptr) return;
    branch.stream = nullptr;
    if (branch.number < stream->retired) return;
    Request& request = stream->open[stream->first + (branch.number - stream->retired)];
    request.resolved |= 1u << current_lane;
    if (request.next == 0) request.next = next;
    request.diverged = request.diverged || request.next != next;
    if (request.resolved == worker.warp_[stream->place.warp].lanes) retire_complete(*stream, worker);
  }

  void count(const Stream& stream, const Request& request) {
    const bool branch = stream.place.kind == Kind::kBranch;
    if (branch && request.next == 0) return;
    const Worker& worker = *Worker::in_kernel();
    Totals& totals = *stream.totals;
    ++totals.requests;
    totals.lanes += static_cast<unsigned>(__builtin_popcount(request.lanes));
    totals.partial += branch ? request.diverged : request.lanes != worker.warp_[stream.place.warp].lanes;
    if (branch) return;
    if (stream.place.space == Space::kShared) {
      count_wavefronts(request, stream.place.size, totals);
    } else {
      totals.sectors += count_sectors(request, stream.place.size);
    }
  }

  void retire(Stream& stream, std::size_t number) {
    for (std::size_t i = 0; i < number; ++i) count(stream, stream.open[stream.first + i]);
    stream.first += number;
    stream.retired += static_cast<unsigned>(number);
    if (stream.first == stream.open.size()) {
      stream.open.clear();
      stream.first = 0;
    } else if (stream.first >= kAhead) {
      stream.open.erase(stream.open.begin(), stream.open.begin() + static_cast<std::ptrdiff_t>(stream.first));
      stream.first = 0;
    }
  }

  // Counts the oldest requests, as long as they have all lanes.
  void retire_complete(Stream& stream, const Worker& worker) {
    const unsigned lanes = worker.warp_[stream.place.warp].lanes;
    const bool branch = stream.place.kind == Kind::kBranch;
    std::size_t number = 0;
    while (number < stream.waiting()) {
      const Request& request = stream.open[stream.first + number];
      if ((branch ? request.resolved : request.lanes) != lanes) break;
      ++number;
    }
    retire(stream, number);
  }

  void retire_all(unsigned warp) {
    for (Stream* const stream : dirty_[warp]) {
      retire(*stream, stream->waiting());
      stream->retired = 0;
      std::fill(std::begin(stream->came), std::end(stream->came), 0u);
      stream->dirty = false;
    }
    dirty_[warp].clear();
    for (unsigned lane = 0; lane < warpSize; ++lane) branch_of_[warp * warpSize + lane].stream = nullptr;
  }

  void retire_all_warps() {
    const unsigned warps = Worker::in_kernel()->warps_;
    for (unsigned warp = 0; warp < warps; ++warp) retire_all(warp);
  }

  // Whether other lanes of the warp have not been at the running lane's last kAhead requests.
  static bool far_ahead(const Stream& stream) { return stream.came[current_lane] > stream.retired + kAhead; }

  // A lane that is far ahead lets the others of its warp catch up. Those that do not come are elsewhere: at a barrier,
  // at the end, or in another branch.
  void wait_for_lanes(Stream& stream, Worker& worker) {
    poll_state.changed = 1;  // so that the watchdog does not take this for polling
    worker.yield();
    worker.enter_runtime();
    if (far_ahead(stream)) retire(stream, stream.waiting() / 2);
  }

  static constexpr std::size_t kRecent = 4096;
  Context root_{nullptr, 0, {}};
  Context* context_of_[kMaxThreads];
  Branch branch_of_[kMaxThreads];
  Stream* recent_[kRecent] = {};
  std::unordered_map<Place, std::unique_ptr<Stream>, PlaceHash> streams_;
  std::unordered_map<Place, Totals, PlaceHash> totals_;
  std::vector<Stream*> dirty_[kMaxWarps];
  std::unordered_map<const KernelInfo*, KernelTotals> kernels_;
  Address thread_locals_begin_, thread_locals_end_;
  const Ranges& constants_ = lasting<Ranges>();
};

inline const Observer AccessCounter::kObserver{
    [](const LaunchConfig&) {},
    [](std::exception_ptr) {},
    [] { mine().begin_block(); },
    [] { mine().end_block(); },
    [] {},
    [](const char*, CallSite, const ShuffleLane*) {},
    [](CallSite site) { mine().pass_barrier(site); },
    [](CallSite site) { mine().shuffle(site); },
    [](unsigned warp, unsigned lanes) { mine().meet(warp, lanes); },
};

}  // namespace kf::simt
