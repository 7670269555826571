// What is done about a fault: an access to a page that is watched is noted and goes on; a fault of a thread of the grid
// becomes the error that its launch ends with. All others are left to whoever had the signal before: the next library
// of this kind, Python, a sanitizer.
//
// A handler allocates nothing and takes no lock. That is why it asks pthread_getspecific for the worker: the first use
// of a thread-local variable of a library may allocate.
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "fault.h"
#include "runtime.h"

namespace kf::simt {
namespace {

constexpr std::size_t kSpareStack = 64 * 1024;
constexpr int kFaults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};

pthread_key_t worker_key;
struct sigaction action_before[NSIG];

// A page range that the caller has made inaccessible.
struct Watched {
  Watched(void* begin_, std::size_t bytes_, Watched* next_)
      : begin(static_cast<char*>(begin_)),
        bytes(bytes_),
        number(next_ == nullptr ? 0 : next_->number + 1),
        next(next_) {}
  char* const begin;
  const std::size_t bytes;
  const unsigned number;
  Watched* const next;
  std::atomic<bool> seen{false};
  std::atomic<bool> told{true};  // to the caller; what was seen and is still being noted counts as told
  // Of the first access.
  const char* address = nullptr;
  bool write = false;
  bool emulated = false;
  const KernelInfo* kernel = nullptr;
  dim3 block;
  uint3 thread;
};
std::atomic<Watched*> watched{nullptr};
std::atomic<unsigned> in_handler{0};  // threads that may look at `watched`

}  // namespace

// The emulated thread that runs on this OS thread, if one does.
Worker* Worker::at_fault() {
  auto* const worker = static_cast<Worker*>(pthread_getspecific(worker_key));
  return worker != nullptr && worker->launch_ != nullptr ? worker : nullptr;
}

bool Worker::note_watched(const Fault& fault) {
  const auto* const address = static_cast<const char*>(fault.address);
  in_handler.fetch_add(1);
  Watched* page = watched.load();
  while (page != nullptr && !(address >= page->begin && address < page->begin + page->bytes)) page = page->next;
  if (page != nullptr && !page->seen.exchange(true)) {
    page->address = address;
    page->write = fault.write;
    if (const Worker* const worker = at_fault()) {
      page->emulated = true;
      page->kernel = worker->launch_->kernel.load();
      page->block = worker->block_index_;
      page->thread = worker->index_of_[worker->current_];
    }
    page->told.store(false);
  }
  const bool found = page != nullptr && mprotect(page->begin, page->bytes, PROT_READ | PROT_WRITE) == 0;
  in_handler.fetch_sub(1);
  return found;
}

// The rest of a fault in a kernel is done on a stack of its own, as if the thread had called it: there it may allocate.

bool Worker::go_on_with(void (*function)(), [[maybe_unused]] void* context) {
#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))
  auto* const machine = &static_cast<ucontext_t*>(context)->uc_mcontext;
  const auto top = reinterpret_cast<std::uintptr_t>(spare_stacks_ + 2 * kSpareStack) - 64;
#if defined(__x86_64__)
  machine->gregs[REG_RSP] = static_cast<greg_t>(top - sizeof(void*));  // as after a call
  machine->gregs[REG_RIP] = reinterpret_cast<greg_t>(function);
#else
  machine->sp = top;
  machine->pc = reinterpret_cast<std::uintptr_t>(function);
#endif
  return true;
#else
  static_cast<void>(function);
  return false;
#endif
}

namespace {

// On the stack of a thread, where AddressSanitizer may have closed this word to all.
__attribute__((no_sanitize("address"))) std::uintptr_t word_at(std::uintptr_t address) {
  return *reinterpret_cast<const volatile std::uintptr_t*>(address);
}

}  // namespace

// Where in the kernel's own code the thread was: at the fault, or where it called a function without a frame, such as
// memcpy. 0 elsewhere: it may hold a lock, of the runtime or of a library, that nobody would give back.
std::uintptr_t Worker::kernels_instruction(const Fault& fault) const {
  const auto inside = [](std::uintptr_t at) { return at >= code_begin && at < code_end; };
  if (inside(fault.at)) return fault.at;
  std::uintptr_t after_call = fault.link;
  const Fiber& fiber = *fiber_of_[current_];
  const auto stack = reinterpret_cast<std::uintptr_t>(fiber.stack);
  if (fault.link == 0 && fault.stack >= stack && fault.stack + sizeof(after_call) <= stack + fiber.size) {
    after_call = word_at(fault.stack);
  }
  return inside(after_call) ? after_call - 1 : 0;
}

namespace {

std::string text_of_access(const Fault& fault) {
  if (fault.kind == Fault::kNoAddress) return "uses an address that no memory can have";
  char address[32];
  std::snprintf(address, sizeof(address), "0x%zx", reinterpret_cast<std::size_t>(fault.address));
  const auto at = reinterpret_cast<std::uintptr_t>(fault.address);
  const char* const what = at == fault.at ? "calls a function at " : fault.write ? "writes to " : "reads ";
  return what + std::string(address);
}

// What there is at the address, begun with a comma: the line comes before it.
std::string text_of_place(Fault* fault) {
  char place[300] = ", where no memory is";
  if (reinterpret_cast<std::uintptr_t>(fault->address) < 0x10000) std::strcpy(place, ", through a null pointer");
  if (program != nullptr) program->explain(fault, true, place, sizeof(place));
  return place;
}

// The host's own access to the device's memory ends the process, as it does on a machine with a GPU.
void say_of_host(Fault fault) {
  char place[300], text[500];
  if (program == nullptr || !program->explain(&fault, false, place, sizeof(place))) return;
  // Elsewhere than in the program's own code, a lock may be held that the search for the line needs.
  const std::string line = fault.at >= code_begin && fault.at < code_end ? line_of(fault.at) : "";
  const int length = std::snprintf(text, sizeof(text), "the host %s %p%s%s%s\n", fault.write ? "writes to" : "reads",
                                   fault.address, line.empty() ? "" : " at ", line.c_str(), place);
  if (write(STDERR_FILENO, text, std::min<std::size_t>(static_cast<std::size_t>(length), sizeof(text) - 1)) < 0) return;
}

}  // namespace

std::string Worker::text_of_fault() const {
  switch (fault_.kind) {
    case Fault::kStack:
      return "has used up its stack of " + std::to_string(stack_bytes_ / 1024) +
             " KB: a recursion without end, or large local arrays (KF_SIMT_STACK_KB gives more)";
    case Fault::kDivision: return "divides an integer by zero, or the smallest one by -1";
    case Fault::kInstruction:
      return "comes to what the compiler knows to be wrong, such as a division by 0 or an access through null, and has "
             "made a trap of";
    default: return text_of_access(fault_);
  }
}

void Worker::after_fault() {
  Worker& worker = *in_kernel();
  fiber_moved(worker.spare_stacks_ + kSpareStack, kSpareStack);
  worker.end_with_fault();  // and its strings are gone
  worker.stop();
}

void Worker::end_with_fault() {
  std::string place;
  if (fault_.kind == Fault::kAlignment) place = ", which is not aligned as its vector must be";
  if (fault_.kind == Fault::kAccess) place = text_of_place(&fault_);
  std::string text = describe(current_) + ": " + text_of_fault();
  const std::string line = line_of(kernels_instruction(fault_));
  if (!line.empty()) text += " at " + line;
  text += place;
  if (line.empty() && fault_.kind != Fault::kStack && fault_.kind != Fault::kDivision) {
    text += "; AddressSanitizer would name the line";
  }
  const race::Quiet quiet;
  launch_->fail(std::make_exception_ptr(DeviceFault(text, fault_.cuda_error())));
}

// An access in a kernel that ends the process all the same says whose it was. Nothing may be allocated here.
void Worker::say_fault() const {
  char name[200], place[300], what[350], text[700];
  const KernelInfo* const kernel = launch_->kernel.load();
  copy_name(kernel != nullptr ? kernel->signature : launch_->config.name, name, sizeof(name));
  const uint3 thread = index_of_[current_];
  Fault fault = fault_;
  if (fault.kind == Fault::kAccess && program != nullptr && program->explain(&fault, true, place, sizeof(place))) {
    std::snprintf(what, sizeof(what), "%s %p%s", fault.write ? "writes to" : "reads", fault.address, place);
  } else {
    std::snprintf(what, sizeof(what), "%s", fault.short_text());
  }
  const int length = std::snprintf(text, sizeof(text), "kernel %s, block (%u,%u,%u), thread (%u,%u,%u): %s\n", name,
                                   block_index_.x, block_index_.y, block_index_.z, thread.x, thread.y, thread.z, what);
  if (write(STDERR_FILENO, text, std::min<std::size_t>(static_cast<std::size_t>(length), sizeof(text) - 1)) < 0) return;
}

// Once a place. Where the compiler put a check before the division, that has named it.
void Worker::warn_of_division(Division division) {
  static std::atomic<std::uintptr_t> told[64];
  if (std::exchange(division_named_, Division::kNone) == division) return;
  for (std::atomic<std::uintptr_t>& place : told) {
    std::uintptr_t none = 0;
    if (place.compare_exchange_strong(none, fault_.at)) break;
    if (none == fault_.at) return;
  }
  const std::string line = line_of(fault_.at);
  std::fprintf(stderr, "warning: %s: divides %s%s%s. The result is that of an H200.\n", describe(current_).c_str(),
               division == Division::kByZero ? "an integer by zero" : "the smallest integer by -1",
               line.empty() ? "" : " at ", line.c_str());
}

// True if the thread goes on, with what it did or with the end of its launch.
bool Worker::take_fault(const Fault& fault, void* context) {
  const Fiber* const fiber = fiber_of_[current_];
  if (fiber == nullptr) return false;  // between two threads
  fault_ = fault;
  const auto* const address = static_cast<const char*>(fault.address);
  if (fault.is_access() && address >= fiber->stack - kStackGuard && address < fiber->stack) fault_.kind = Fault::kStack;
  const bool in_kernel = in_user_code() && kernels_instruction(fault) != 0;
  if (fault.kind == Fault::kDivision && in_kernel && !launch_->settings.undefined_is_error) {
    if (const Division done = divide_as_a_gpu(context); done != Division::kNone) {
      enter_runtime();
      warn_of_division(done);
      leave_runtime();
      return true;
    }
  }
#ifdef KF_SIMT_ASAN
  const bool reported = fault.is_access() && fault_.kind != Fault::kStack;  // with the line, by AddressSanitizer
#else
  const bool reported = false;
#endif
  if (in_kernel && !reported && go_on_with(after_fault, context)) {
    enter_runtime();  // here already: the watchdog's signal may come before the thread goes on
    return true;
  }
  say_fault();
  return false;
}

void Worker::on_fault(int signal, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  const bool at_an_instruction = info->si_code > 0;  // and not sent by somebody
  if (at_an_instruction) {
    const Fault fault(signal, info, context);
    Worker* const worker = at_fault();
    // A vector that is not aligned stops at any page, open or not.
    const bool opened =
        fault.is_access() && fault.kind != Fault::kAlignment &&
        (note_watched(fault) || (program != nullptr && program->take(fault, worker != nullptr || in_runtime_call())));
    if (opened || (worker != nullptr && worker->take_fault(fault, context))) {
      errno = saved_errno;
      return;
    }
    if (worker == nullptr && fault.is_access()) say_of_host(fault);
  }
  const struct sigaction& before = action_before[signal];
  if (before.sa_flags & SA_SIGINFO) {
    before.sa_sigaction(signal, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(signal);
  } else {
    set_signal_action(signal, &before, nullptr);  // the instruction faults again
    if (!at_an_instruction) raise(signal);
  }
  errno = saved_errno;
}

void Worker::handle_faults() {
  static const bool installed = [] {
    pthread_key_create(&worker_key, nullptr);
    find_own_code();
    struct sigaction action{};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaddset(&action.sa_mask, kSignal);  // which must not find a thread on the handler's stack
    for (const int signal : kFaults) set_signal_action(signal, &action, &action_before[signal]);
    return true;
  }();
  static_cast<void>(installed);
}

// For the handler, and for what follows it where a stack is full.
void Worker::make_spare_stacks() {
  handle_faults();
  pthread_setspecific(worker_key, this);
  void* const memory =
      mmap(nullptr, 2 * kSpareStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  spare_stacks_ = static_cast<char*>(memory);
  race::add_stacks(spare_stacks_, spare_stacks_ + 2 * kSpareStack);
  stack_t now{};
  if (sigaltstack(nullptr, &now) == 0 && (now.ss_flags & SS_DISABLE)) {
    stack_t own{};
    own.ss_sp = spare_stacks_;
    own.ss_size = kSpareStack;
    handler_has_stack_ = sigaltstack(&own, nullptr) == 0;
  }
}

void Worker::drop_spare_stacks() {
  pthread_setspecific(worker_key, nullptr);
  if (handler_has_stack_) {
    stack_t none{};
    none.ss_flags = SS_DISABLE;
    sigaltstack(&none, nullptr);
  }
  munmap(spare_stacks_, 2 * kSpareStack);
}

namespace {

std::string text_of(const Watched& page) {
  char head[160];
  std::snprintf(head, sizeof(head), "region %u: %s %p, %td bytes into it, by ", page.number,
                page.write ? "writes" : "reads", static_cast<const void*>(page.address), page.address - page.begin);
  if (!page.emulated) return std::string(head) + "a thread that is not emulated";
  char place[160];
  std::snprintf(place, sizeof(place), ", block (%u,%u,%u), thread (%u,%u,%u)", page.block.x, page.block.y, page.block.z,
                page.thread.x, page.thread.y, page.thread.z);
  return head + ("kernel " + (page.kernel != nullptr ? short_name(page.kernel->signature) : "")) + place;
}

}  // namespace
}  // namespace kf::simt

// For tests of a library's kernels, by ctypes. Each library has regions of its own. None of the three may be called
// while somebody else uses the memory.
extern "C" {

// Watches whole pages that the caller has made PROT_NONE. The first access, by any thread, is noted, makes the region
// readable and writable, and goes on. Regions are numbered from 0.
__attribute__((visibility("default"))) void kf_simt_watch(void* begin, std::size_t bytes) {
  using namespace kf::simt;
  Worker::handle_faults();
  watched.store(new Watched(begin, bytes, watched.load()));
}

// How many regions were accessed since the last call. `text` gets a line for each, as far as its `size` goes.
__attribute__((visibility("default"))) std::size_t kf_simt_seen(char* text, std::size_t size) {
  using namespace kf::simt;
  std::size_t count = 0;
  std::string all;
  for (Watched* page = watched.load(); page != nullptr; page = page->next) {
    if (page->told.exchange(true)) continue;
    ++count;
    all.insert(0, text_of(*page) + "\n");  // the list begins with the last
  }
  if (size != 0) std::snprintf(text, size, "%s", all.c_str());
  return count;
}

// Forgets all regions; their protection stays what it is.
__attribute__((visibility("default"))) void kf_simt_unwatch(void) {
  using namespace kf::simt;
  Watched* page = watched.exchange(nullptr);
  while (in_handler.load() != 0) sched_yield();
  while (page != nullptr) {
    Watched* const next = page->next;
    delete page;
    page = next;
  }
}

}  // extern "C"
