// Counts the memory accesses of kernels as a GPU makes them: by warp, in sectors of global memory, in wavefronts of
// shared memory.
//
// A kernel that was compiled with -fsanitize=thread calls __tsan_read4 and the like before each access; here they are
// ours. -fsanitize-coverage=trace-pc,trace-cmp makes it also call at each comparison and each basic block. The rest of
// the emulation is compiled without these flags. Lanes do not run in lockstep: the accesses that one lane makes at a
// place in the program are numbered, and those of the 32 lanes with the same number are the warp's request. A place is
// a return address and the calls that led to it. The numbers start anew wherever the warp's lanes meet, so that a
// branch that some lanes did not take does not shift what comes after.
//
// Where the environment's KF_SIMT_COUNT names a file, it gets the counts when the process ends, as JSON. Who loads this
// as a library can have those of each call, by kf_simt_write_counts.
// kernel_fusion/counts.py turns addresses into source lines.
#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <tuple>
#include <unordered_map>

#include "../src/runtime.h"

#ifdef __clang__
#error counting needs g++ (CXX=g++): clang adds its calls to loops that it has vectorised, and joins what lanes do apart
#endif

namespace kf::simt {
namespace {

using Address = std::uintptr_t;

constexpr unsigned kBanks = 32, kBankBytes = 4, kSectorBytes = 32;
constexpr unsigned kAhead = 2048;  // requests of one place that may wait for lanes; a lane further ahead waits

enum class Kind : unsigned char { kLoad, kStore, kAtomic, kAtomicLoad, kBranch };
enum class Space : unsigned char { kGlobal, kShared, kConstant, kNone };
enum class Reading : unsigned char { kSure, kMembers, kWhole };  // of a structure; both are counted
const char* const kKindNames[] = {"load", "store", "atomic", "atomic load", "branch"};
const char* const kSpaceNames[] = {"global", "shared", "constant", ""};
const char* const kReadingNames[] = {"", "members", "whole"};

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
  unsigned char size;  // bytes of one lane; 0 for a branch
  unsigned char warp;

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
unsigned count_sectors(const Request& request, unsigned size) {
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
void count_wavefronts(const Request& request, unsigned size, Totals& totals) {
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
  std::vector<std::pair<Address, Address>> constant;

  Ranges() {
    Dl_info info;
    void* map = nullptr;
    if (dladdr1(reinterpret_cast<const void*>(&kKindNames), &info, &map, RTLD_DL_LINKMAP) == 0) return;
    const Address base = static_cast<const link_map*>(map)->l_addr;
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
            if ((s.p_type == PT_LOAD && !(s.p_flags & PF_W)) || s.p_type == PT_GNU_RELRO) {
              self.add(module->dlpi_addr + s.p_vaddr, s.p_memsz);
            }
          }
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

const Ranges& ranges() {
  static const Ranges* const found = new Ranges;
  return *found;
}

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
  std::map<std::pair<std::string, int>, std::uint64_t> barriers;  // passed by blocks, by file and line
};

}  // namespace

// The counts of one OS thread. A friend of the worker whose threads it watches.
class AccessCounter {
 public:
  AccessCounter() {
    thread_locals_begin_ = thread_locals_end_ = reinterpret_cast<Address>(&threadIdx);
    const auto include = [this](const auto& variable) {
      const auto at = reinterpret_cast<Address>(&variable);
      thread_locals_begin_ = std::min(thread_locals_begin_, at);
      thread_locals_end_ = std::max(thread_locals_end_, at + sizeof(variable));
    };
    include(threadIdx);
    include(blockIdx);
    include(blockDim);
    include(gridDim);
    include(entered_kernel);
    include(poll_state);
    include(current_lane);
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

  // If all lanes that are left have met, the numbering of their accesses starts anew.
  void meet(unsigned warp, unsigned lanes) {
    const Worker::Warp& of = Worker::in_kernel()->warp_[warp];
    if ((of.lanes & ~of.exited & ~lanes) == 0) retire_all(warp);
  }

  void enter(Address call) {
    const Uninterrupted uninterrupted(*Worker::in_kernel());
    Context*& context = context_of_[thread()];
    context = context->child(call);
  }

  void leave() {
    Context*& context = context_of_[thread()];
    if (context->parent != nullptr) context = context->parent;
  }

  void access(Address pc, Kind kind, Reading reading, Address address, unsigned size) {
    Worker& worker = *Worker::in_kernel();
    const Uninterrupted uninterrupted(worker);
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

  // A comparison may be what the next branch depends on.
  void compare(Address pc) {
    Worker& worker = *Worker::in_kernel();
    const Uninterrupted uninterrupted(worker);
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
    const Uninterrupted uninterrupted(worker);
    resolve(worker, pc);
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
  // A signal that takes a thread's turn away must not come in between.
  class Uninterrupted {
   public:
    explicit Uninterrupted(Worker& worker) : worker_(worker) { worker_.enter_runtime(); }
    ~Uninterrupted() { worker_.leave_runtime(); }
    Uninterrupted(const Uninterrupted&) = delete;
    Uninterrupted& operator=(const Uninterrupted&) = delete;

   private:
    Worker& worker_;
  };

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
  static Registry& all() {
    static auto* const registry = new Registry;
    return *registry;
  }

  static unsigned thread() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }

  Space space_of(const Worker& worker, Address address) const {
    const auto within = [address](const void* begin, const void* end) {
      return address >= reinterpret_cast<Address>(begin) && address < reinterpret_cast<Address>(end);
    };
    if (within(worker.arena_, worker.static_end_)) return Space::kShared;
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

  Stream& stream_at(Address pc, Kind kind, Space space, Reading reading, unsigned size) {
    const unsigned thread_number = thread();
    const unsigned warp = thread_number / warpSize;
    const Place place{entered_kernel,
                      context_of_[thread_number],
                      pc,
                      kind,
                      space,
                      reading,
                      static_cast<unsigned char>(size),
                      static_cast<unsigned char>(warp)};
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
  const Ranges& constants_ = ranges();
};

namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + '"';
}

std::string hex(Address pc, Address base) {
  char text[32];
  std::snprintf(text, sizeof(text), "\"%zx\"", static_cast<std::size_t>(pc - base));
  return text;
}

std::string dimensions(const dim3& d) {
  return "[" + std::to_string(d.x) + "," + std::to_string(d.y) + "," + std::to_string(d.z) + "]";
}

}  // namespace

// {"kernels": [{name, signature, blocks, launches: [{grid, block, shared, times}], barriers: [{file, line, times}]}],
//  "places": [{kernel, pc: [addresses, innermost first], kind, space, size, requests, …}]}. Addresses are relative to
// where this program or library was loaded, and lie within the calling instruction.
void AccessCounter::write(const char* path) {
  std::FILE* const file = std::fopen(path, "w");
  if (file == nullptr) {
    std::fprintf(stderr, "KF_SIMT_COUNT: cannot write %s\n", path);
    return;
  }
  Dl_info info;
  void* map = nullptr;
  const bool found = dladdr1(reinterpret_cast<const void*>(&kKindNames), &info, &map, RTLD_DL_LINKMAP) != 0;
  const Address base = found ? static_cast<const link_map*>(map)->l_addr : 0;

  const std::lock_guard<std::mutex> lock(all().mutex);
  std::map<const KernelInfo*, KernelTotals> kernels;
  for (const AccessCounter* counter : all().counters) {
    for (const auto& [kernel, totals] : counter->kernels_) {
      KernelTotals& sum = kernels[kernel];
      sum.blocks += totals.blocks;
      for (const auto& [shape, times] : totals.launches) sum.launches[shape] += times;
      for (const auto& [place, times] : totals.barriers) sum.barriers[place] += times;
    }
  }
  std::string out = "{\"kernels\": [";
  std::map<const KernelInfo*, std::size_t> number_of;
  for (const auto& [kernel, totals] : kernels) {
    out += number_of.empty() ? "\n" : ",\n";
    number_of.emplace(kernel, number_of.size());
    out += "{\"name\": " + quoted(short_name(kernel->signature)) + ", \"signature\": " + quoted(kernel->signature) +
           ", \"blocks\": " + std::to_string(totals.blocks) + ", \"launches\": [";
    const char* comma = "";
    for (const auto& [shape, times] : totals.launches) {
      out += comma + ("{\"grid\": " + dimensions(shape.grid)) + ", \"block\": " + dimensions(shape.block) +
             ", \"shared\": " + std::to_string(shape.shared) + ", \"times\": " + std::to_string(times) + "}";
      comma = ", ";
    }
    out += "], \"barriers\": [";
    comma = "";
    for (const auto& [place, times] : totals.barriers) {
      out += comma + ("{\"file\": " + quoted(place.first)) + ", \"line\": " + std::to_string(place.second) +
             ", \"times\": " + std::to_string(times) + "}";
      comma = ", ";
    }
    out += "]}";
  }
  out += "],\n\"places\": [";
  const char* comma = "\n";
  for (const AccessCounter* counter : all().counters) {
    for (const auto& [place, totals] : counter->totals_) {
      if (totals.requests == 0 || number_of.count(place.kernel) == 0) continue;
      out +=
          comma + ("{\"kernel\": " + std::to_string(number_of[place.kernel])) + ", \"pc\": [" + hex(place.pc - 1, base);
      for (const Context* context = place.context; context->parent != nullptr; context = context->parent) {
        out += ", " + hex(context->call - 1, base);
      }
      out += std::string("], \"kind\": \"") + kKindNames[static_cast<int>(place.kind)] + "\", \"space\": \"" +
             kSpaceNames[static_cast<int>(place.space)] + "\", \"reading\": \"" +
             kReadingNames[static_cast<int>(place.reading)] + "\", \"size\": " + std::to_string(place.size);
      const auto field = [&](const char* name, std::uint64_t value) {
        out += std::string(", \"") + name + "\": " + std::to_string(value);
      };
      field("requests", totals.requests);
      field("lanes", totals.lanes);
      field("partial", totals.partial);
      field("sectors", totals.sectors);
      field("wavefronts", totals.wavefronts);
      field("conflicts", totals.conflicts);
      out += "}";
      comma = ",\n";
    }
  }
  out += "]}\n";
  const bool whole = std::fwrite(out.data(), 1, out.size(), file) == out.size();
  if (std::fclose(file) != 0 || !whole) std::fprintf(stderr, "KF_SIMT_COUNT: cannot write %s\n", path);
}

namespace {

const Observer counting{
    [] { AccessCounter::mine().begin_block(); },
    [] { AccessCounter::mine().end_block(); },
    [](CallSite site) { AccessCounter::mine().pass_barrier(site); },
    [](unsigned warp, unsigned lanes) { AccessCounter::mine().meet(warp, lanes); },
};

struct Start {
  Start() { observer = &counting; }
  ~Start() {
    if (const char* const path = std::getenv("KF_SIMT_COUNT")) AccessCounter::write(path);
  }
} start;

Address address_of(const volatile void* pointer) { return reinterpret_cast<Address>(pointer); }

inline void note(const void* pc, Kind kind, const volatile void* address, unsigned size,
                 Reading reading = Reading::kSure) {
  AccessCounter* const counter = AccessCounter::running();
  if (counter != nullptr) counter->access(address_of(pc), kind, reading, address_of(address), size);
}

// The largest piece that an instruction can move at once, up to 16 bytes: a power of two that divides address and size.
unsigned widest(Address address, std::size_t size) {
  const std::size_t both = address | size | 16;
  return static_cast<unsigned>(both & ~(both - 1));
}

void note_pieces(const void* pc, Kind kind, const void* address, std::size_t size, unsigned piece, Reading reading) {
  for (std::size_t at = 0; at < size; at += piece) {
    note(pc, kind, static_cast<const char*>(address) + at, piece, reading);
  }
}

// The compiler reports a structure in one piece if it is larger than 16 bytes, or no power of two, or less aligned than
// its size would need. In the last case its members are smaller, of 4 bytes most often. But where the emulation itself
// moves memory for an instruction, it is one access. Who reads the counts knows whose code it was.
void note_structure(const void* pc, Kind kind, const void* address, std::size_t size) {
  const unsigned piece = widest(address_of(address), size);
  if (piece != size || size == 1) {
    note_pieces(pc, kind, address, size, piece, Reading::kSure);
  } else {
    note_pieces(pc, kind, address, size, size > 4 ? 4 : piece / 2, Reading::kMembers);
    note_pieces(pc, kind, address, size, piece, Reading::kWhole);
  }
}

}  // namespace
}  // namespace kf::simt

// What instrumented code calls. `__builtin_return_address(0)` is the place that called.

#define KF_HERE __builtin_return_address(0)
using kf::simt::AccessCounter;
using kf::simt::Kind;

extern "C" {

// Writes what has been counted since the last call. No launch may be under way.
__attribute__((visibility("default"))) void kf_simt_write_counts(const char* path) {
  AccessCounter::write(path);
  AccessCounter::clear();
}

void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

void __tsan_func_entry(void* call) {
  AccessCounter* const counter = AccessCounter::running();
  if (counter != nullptr) counter->enter(reinterpret_cast<std::uintptr_t>(call));
}
void __tsan_func_exit() {
  AccessCounter* const counter = AccessCounter::running();
  if (counter != nullptr) counter->leave();
}

#define KF_ACCESS(size)                                                                          \
  void __tsan_read##size(void* address) { kf::simt::note(KF_HERE, Kind::kLoad, address, size); } \
  void __tsan_write##size(void* address) { kf::simt::note(KF_HERE, Kind::kStore, address, size); }
KF_ACCESS(1)
KF_ACCESS(2)
KF_ACCESS(4)
KF_ACCESS(8)
KF_ACCESS(16)

void __tsan_read_range(void* address, unsigned long size) {
  kf::simt::note_structure(KF_HERE, Kind::kLoad, address, size);
}
void __tsan_write_range(void* address, unsigned long size) {
  kf::simt::note_structure(KF_HERE, Kind::kStore, address, size);
}
// Atomics are done here, and counted. Their order is the strongest, whatever was asked for.
#define KF_FETCH(T, bits, name)                                             \
  T __tsan_atomic##bits##_fetch_##name(volatile T* address, T value, int) { \
    kf::simt::note(KF_HERE, Kind::kAtomic, address, sizeof(T));             \
    return __atomic_fetch_##name(address, value, __ATOMIC_SEQ_CST);         \
  }
#define KF_COMPARE_EXCHANGE(T, bits, name)                                                                     \
  int __tsan_atomic##bits##_compare_exchange_##name(volatile T* address, T* expected, T desired, int, int) {   \
    kf::simt::note(KF_HERE, Kind::kAtomic, address, sizeof(T));                                                \
    return __atomic_compare_exchange_n(address, expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }
#define KF_ATOMICS(T, bits)                                             \
  T __tsan_atomic##bits##_load(const volatile T* address, int) {        \
    kf::simt::note(KF_HERE, Kind::kAtomicLoad, address, sizeof(T));     \
    return __atomic_load_n(address, __ATOMIC_SEQ_CST);                  \
  }                                                                     \
  void __tsan_atomic##bits##_store(volatile T* address, T value, int) { \
    kf::simt::note(KF_HERE, Kind::kStore, address, sizeof(T));          \
    __atomic_store_n(address, value, __ATOMIC_SEQ_CST);                 \
  }                                                                     \
  T __tsan_atomic##bits##_exchange(volatile T* address, T value, int) { \
    kf::simt::note(KF_HERE, Kind::kAtomic, address, sizeof(T));         \
    return __atomic_exchange_n(address, value, __ATOMIC_SEQ_CST);       \
  }                                                                     \
  KF_FETCH(T, bits, add)                                                \
  KF_FETCH(T, bits, sub)                                                \
  KF_FETCH(T, bits, and)                                                \
  KF_FETCH(T, bits, or)                                                 \
  KF_FETCH(T, bits, xor)                                                \
  KF_COMPARE_EXCHANGE(T, bits, strong)                                  \
  KF_COMPARE_EXCHANGE(T, bits, weak)
KF_ATOMICS(std::uint8_t, 8)
KF_ATOMICS(std::uint16_t, 16)
KF_ATOMICS(std::uint32_t, 32)
KF_ATOMICS(std::uint64_t, 64)

void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_atomic_signal_fence(int) {}

void __sanitizer_cov_trace_pc() {
  AccessCounter* const counter = AccessCounter::running();
  if (counter != nullptr) counter->enter_basic_block(reinterpret_cast<std::uintptr_t>(KF_HERE));
}
#define KF_COMPARE(name, ...)                                                            \
  void __sanitizer_cov_trace_##name(__VA_ARGS__) {                                       \
    AccessCounter* const counter = AccessCounter::running();                             \
    if (counter != nullptr) counter->compare(reinterpret_cast<std::uintptr_t>(KF_HERE)); \
  }
KF_COMPARE(cmp1, std::uint8_t, std::uint8_t)
KF_COMPARE(cmp2, std::uint16_t, std::uint16_t)
KF_COMPARE(cmp4, std::uint32_t, std::uint32_t)
KF_COMPARE(cmp8, std::uint64_t, std::uint64_t)
KF_COMPARE(const_cmp1, std::uint8_t, std::uint8_t)
KF_COMPARE(const_cmp2, std::uint16_t, std::uint16_t)
KF_COMPARE(const_cmp4, std::uint32_t, std::uint32_t)
KF_COMPARE(const_cmp8, std::uint64_t, std::uint64_t)
KF_COMPARE(cmpf, float, float)
KF_COMPARE(cmpd, double, double)
KF_COMPARE(switch, std::uint64_t, std::uint64_t*)

}  // extern "C"
