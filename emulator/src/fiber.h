// Fibers: stacks of their own, switched by hand within one OS thread.
#pragma once

#include <cstddef>

#if !defined(KF_SIMT_SETJMP) && !defined(__x86_64__) && !defined(__aarch64__)
#define KF_SIMT_SETJMP 1
#endif

#ifdef KF_SIMT_SETJMP
#include <setjmp.h>
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#define KF_SIMT_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KF_SIMT_ASAN 1
#endif
#endif

#ifndef KF_SIMT_SETJMP
// Pushes what a call must preserve, stores the stack pointer, and takes the other one.
extern "C" void kf_simt_switch(void** save, void* to) __attribute__((visibility("hidden")));
#endif

namespace kf::simt {

struct Fiber {
  char* stack = nullptr;  // lowest usable address; null for an OS thread's own stack
  std::size_t size = 0;
  std::size_t color = 0;  // how far below the stack's end it begins
#ifdef KF_SIMT_SETJMP
  jmp_buf env;
  ucontext_t first;
  bool fresh = false;
#else
  void* sp = nullptr;
#endif
#ifdef KF_SIMT_ASAN
  void* fake_stack = nullptr;
#endif
};

// Makes `fiber` begin at entry(argument) when it is next switched to, whatever it did before. Entry never returns.
void fiber_reset(Fiber& fiber, void (*entry)(void*), void* argument);

// Leaves `from`, which is running, for `to`. Returns when something switches back.
#if defined(KF_SIMT_SETJMP) || defined(KF_SIMT_ASAN)
void fiber_switch(Fiber& from, Fiber& to);
#else
inline void fiber_switch(Fiber& from, Fiber& to) { kf_simt_switch(&from.sp, to.sp); }
#endif

// Brings the top of a stack into the cache.
inline void fiber_prefetch([[maybe_unused]] const Fiber& fiber) {
#ifndef KF_SIMT_SETJMP
  const char* const top = static_cast<const char*>(fiber.sp);
  for (int line = 0; line < 4; ++line) __builtin_prefetch(top + 64 * line);
#endif
}

// What entry must call first.
void fiber_entered();

// The running fiber goes on on another stack, and never goes back to its own.
void fiber_moved(const char* stack, std::size_t size);

// Describes the OS thread's own stack.
void fiber_adopt_thread(Fiber& fiber);

// Stacks are mapped several at a time, each with guard pages below it, which no ordinary frame steps over.
constexpr std::size_t kStackGuard = 64 * 1024;
class StackSlab {
 public:
  StackSlab(std::size_t stacks, std::size_t stack_bytes);
  ~StackSlab();
  StackSlab(const StackSlab&) = delete;
  StackSlab& operator=(const StackSlab&) = delete;
  char* stack(std::size_t index) const { return base_ + index * stride_ + guard_; }
  std::size_t usable() const { return stride_ - guard_; }
  const char* begin() const { return base_; }
  const char* end() const { return base_ + count_ * stride_; }

 private:
  char* base_;
  std::size_t count_, stride_, guard_;
  bool guarded_;
};

}  // namespace kf::simt
