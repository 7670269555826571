#include "fiber.h"

#include "race.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <new>

#ifdef KF_SIMT_ASAN
#include <pthread.h>
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#ifndef KF_SIMT_SETJMP
// kf_simt_switch ends with a return and not a jump: threads of a block mostly switch at the same place of the same
// functions, so the return addresses that the processor has noted for one are right for the next.
// kf_simt_begin is where a new stack starts; the entry and its argument lie in preserved registers.
extern "C" void kf_simt_begin() __attribute__((visibility("hidden")));
#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.globl kf_simt_switch
.hidden kf_simt_switch
.type kf_simt_switch, @function
kf_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size kf_simt_switch, .-kf_simt_switch
.p2align 4
.globl kf_simt_begin
.hidden kf_simt_begin
.type kf_simt_begin, @function
kf_simt_begin:
  .cfi_startproc
  .cfi_undefined rip
  movq %r12, %rdi
  callq *%r13
  ud2
  .cfi_endproc
.size kf_simt_begin, .-kf_simt_begin
)");
#else
asm(R"(
.text
.p2align 4
.globl kf_simt_switch
.hidden kf_simt_switch
.type kf_simt_switch, %function
kf_simt_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size kf_simt_switch, .-kf_simt_switch
.p2align 4
.globl kf_simt_begin
.hidden kf_simt_begin
.type kf_simt_begin, %function
kf_simt_begin:
  .cfi_startproc
  .cfi_undefined x30
  mov x0, x19
  blr x20
  brk #1
  .cfi_endproc
.size kf_simt_begin, .-kf_simt_begin
)");
#endif
#endif

namespace kf::simt {

#ifdef KF_SIMT_SETJMP
// A new fiber is entered once through its ucontext; every later switch is a jump.
struct Entry {
  void (*function)(void*);
  void* argument;
};

static void begin_fiber(unsigned high, unsigned low) {
  const auto* entry = reinterpret_cast<Entry*>(static_cast<std::uintptr_t>(std::uint64_t{high} << 32 | low));
  entry->function(entry->argument);
}
#endif

void fiber_reset(Fiber& fiber, void (*entry)(void*), void* argument) {
#ifdef KF_SIMT_ASAN
  // Frames that were abandoned left their red zones behind.
  __asan_unpoison_memory_region(fiber.stack, fiber.size);
  fiber.fake_stack = nullptr;
#endif
  // Stacks lie whole pages apart. Without an offset of their own, the tops of all would share the same few cache sets.
  const std::uintptr_t top =
      (reinterpret_cast<std::uintptr_t>(fiber.stack) + fiber.size - fiber.color) & ~std::uintptr_t{63};
#ifdef KF_SIMT_SETJMP
  auto* const start = reinterpret_cast<Entry*>(top - sizeof(Entry));
  *start = {entry, argument};
  getcontext(&fiber.first);
  fiber.first.uc_stack.ss_sp = fiber.stack;
  fiber.first.uc_stack.ss_size = static_cast<std::size_t>(top - 64 - reinterpret_cast<std::uintptr_t>(fiber.stack));
  fiber.first.uc_link = nullptr;
  const auto address = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(start));
  makecontext(&fiber.first, reinterpret_cast<void (*)()>(begin_fiber), 2, static_cast<unsigned>(address >> 32),
              static_cast<unsigned>(address));
  fiber.fresh = true;
#else
#if defined(__x86_64__)
  constexpr int kWords = 9;  // r15 r14 r13 r12 rbx rbp, where to go; two more keep the stack aligned
  constexpr int kEntry = 2, kArgument = 3, kStart = 6;
#else
  constexpr int kWords = 20;  // x19 to x30, d8 to d15
  constexpr int kEntry = 1, kArgument = 0, kStart = 11;
#endif
  void** const frame = reinterpret_cast<void**>(top) - kWords;
  std::memset(frame, 0, kWords * sizeof(void*));
  frame[kEntry] = reinterpret_cast<void*>(entry);
  frame[kArgument] = argument;
  frame[kStart] = reinterpret_cast<void*>(kf_simt_begin);
  fiber.sp = frame;
#endif
}

#if defined(KF_SIMT_SETJMP) || defined(KF_SIMT_ASAN)
void fiber_switch(Fiber& from, Fiber& to) {
#ifdef KF_SIMT_ASAN
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.size);
#endif
#ifdef KF_SIMT_SETJMP
  if (_setjmp(from.env) == 0) {
    if (to.fresh) {
      to.fresh = false;
      setcontext(&to.first);
    } else {
      _longjmp(to.env, 1);
    }
  }
#else
  kf_simt_switch(&from.sp, to.sp);
#endif
#ifdef KF_SIMT_ASAN
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}
#endif

void fiber_entered() {
#ifdef KF_SIMT_ASAN
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
}

void fiber_moved([[maybe_unused]] const char* stack, [[maybe_unused]] std::size_t size) {
#ifdef KF_SIMT_ASAN
  __sanitizer_start_switch_fiber(nullptr, stack, size);
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
}

void fiber_adopt_thread([[maybe_unused]] Fiber& fiber) {
#ifdef KF_SIMT_ASAN
  pthread_attr_t attributes;
  if (pthread_getattr_np(pthread_self(), &attributes) == 0) {
    void* stack = nullptr;
    pthread_attr_getstack(&attributes, &stack, &fiber.size);
    fiber.stack = static_cast<char*>(stack);
    pthread_attr_destroy(&attributes);
  }
#endif
}

// A guard page splits a mapping in two, and the kernel limits their number (65,530 by default). Beyond this many stacks
// there are no guards.
constexpr std::size_t kMaxGuarded = 8192;
static std::atomic<std::size_t> guarded_stacks{0};

StackSlab::StackSlab(std::size_t stacks, std::size_t stack_bytes) : count_(stacks) {
  guard_ = kStackGuard;
  stride_ = stack_bytes + guard_;
  void* const memory =
      mmap(nullptr, count_ * stride_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<char*>(memory);
  race::add_stacks(base_, base_ + count_ * stride_);
  guarded_ = guarded_stacks.fetch_add(count_) + count_ <= kMaxGuarded;
  if (guarded_) {
    for (std::size_t i = 0; i < count_; ++i) mprotect(base_ + i * stride_, guard_, PROT_NONE);
  } else {
    guarded_stacks.fetch_sub(count_);
  }
}

StackSlab::~StackSlab() {
#ifdef KF_SIMT_ASAN
  __asan_unpoison_memory_region(base_, count_ * stride_);
#endif
  if (race::kOn) return;  // which must not meet this memory as anything else
  munmap(base_, count_ * stride_);
  if (guarded_) guarded_stacks.fetch_sub(count_);
}

}  // namespace kf::simt
