// Errors in words: which thread of which kernel waits where, and for whom.
#include <cstdio>
#include <cstdlib>

#include "scheduler.h"

namespace kf::simt {

std::string text_of(const CallSite& site) { return std::string(site.file) + ":" + std::to_string(site.line); }

std::string text_of(const uint3& v) {
  return "(" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + ")";
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

std::string Worker::name_thread(unsigned thread) const { return text_of(index_of_[thread]); }

std::string Worker::kernel_name() const {
  const KernelInfo* const kernel = launch_->kernel.load(std::memory_order_acquire);
  return kernel != nullptr ? short_name(kernel->signature) : launch_->config.name;
}

std::string Worker::describe(unsigned thread) const {
  return "kernel " + kernel_name() + ", block " + text_of(block_index_) + ", thread " + name_thread(thread);
}

std::string Worker::describe_for_watchdog() const { return describe(polling_); }

std::string Worker::describe_endless() const {
  if (polled_.name == nullptr) {
    return describe(polling_) + ": polls memory that no thread changes any more; the launch can never end";
  }
  return describe(polling_) + ": waits at " + polled_.name + " (" + text_of(polled_.site) +
         ") for what never comes; the launch can never end";
}

void Worker::record_error(unsigned thread, const std::string& what) {
  const race::Quiet quiet;
  launch_->fail(std::make_exception_ptr(Error(describe(thread) + ": " + what)));
}

unsigned Worker::first_exited() const {
  unsigned w = 0;
  while (warp_[w].exited == 0) ++w;
  return w * warpSize + static_cast<unsigned>(__builtin_ctz(warp_[w].exited));
}

// The first thread that waits for others; threads that only gave way do not.
unsigned Worker::first_waiting() const {
  for (unsigned i = 0; i < threads_; ++i) {
    const Warp& warp = warp_[i / warpSize];
    const unsigned bit = 1u << i % warpSize;
    if (fiber_of_[i] != nullptr && i != current_ && ((warp.exited | warp.ready | warp.yielded) & bit) == 0) return i;
  }
  return current_;
}

Worker::Place Worker::place_of(unsigned thread) const {
  if (wait_[thread] == Wait::kActiveMask) return {"__activemask", active_site_[thread]};
  if (wait_[thread] == Wait::kNamed) return {"bar.sync", active_site_[thread]};
  if (wait_[thread] == Wait::kWarp) {
    const Warp& warp = warp_[thread / warpSize];
    for (unsigned i = 0; i < warp.open; ++i) {
      const WarpOperation& operation = warp.operations[i];
      if (operation.arrived >> thread % warpSize & 1) return {operation.name, operation.site};
    }
  }
  return barrier_;
}

// No thread can run, and not all have exited: each that is left waits for another.
void Worker::report_deadlock() {
  unsigned waiting = 0;
  while (fiber_of_[waiting] == nullptr) ++waiting;
  const Place place = place_of(waiting);
  std::string what = std::string("waits at ") + place.name + " (" + text_of(place.site) + ")";
  for (unsigned i = waiting + 1; i < threads_; ++i) {
    if (fiber_of_[i] == nullptr) continue;
    const Place other = place_of(i);
    if (std::strcmp(other.name, place.name) == 0 && same_site(other.site, place.site)) continue;
    what += ", while thread " + name_thread(i) + " waits at " + other.name + " (" + text_of(other.site) + ")";
    break;
  }
  record_error(waiting, what + ": neither can go on");
}

// What kernels call.

void kernel_error(const char* what, CallSite site) {
  running(what).fail([&] { return std::string(what) + " at " + text_of(site); });
}

void assert_failed(const char* expression, const char* file, unsigned line, const char* function) {
  Worker* const worker = Worker::in_kernel();
  if (worker != nullptr) {
    worker->fail([&] {
      return std::string("assertion `") + expression + "` failed at " +
             text_of(CallSite{file, static_cast<int>(line), 0});
    });
  }
  std::fprintf(stderr, "%s:%u: %s: Assertion `%s' failed.\n", file, line, function, expression);
  std::abort();
}

}  // namespace kf::simt
