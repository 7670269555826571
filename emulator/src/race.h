// Which thread of the grid does what, told to ThreadSanitizer; and its reports in CUDA's words.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstddef>
#include <string>
#include <vector>

#include "kf_simt/types.h"

namespace kf::simt {

struct SharedSlot;

// What is neither copied nor moved.
struct Pinned {
  Pinned() = default;
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
};

// A lock that handlers of signals and of a sanitizer's reports may take.
class SpinLock : Pinned {
 public:
  explicit SpinLock(std::atomic_flag& flag) : flag_(flag) {
    while (flag_.test_and_set(std::memory_order_acquire)) sched_yield();
  }
  ~SpinLock() { flag_.clear(std::memory_order_release); }

 private:
  std::atomic_flag& flag_;
};

#ifdef KF_SIMT_TSAN

namespace race {

constexpr bool kOn = true;
constexpr unsigned kMaxResident = 7 * 1024;  // threads; ThreadSanitizer knows 8,128, and needs some itself
constexpr unsigned kKept = 2048;             // fibers that the first workers of a launch may make together
constexpr unsigned kKeptEach = 256;          // and each for itself, or as many as two blocks need: more are slower

// What orders threads: those that release it before those that acquire it later. Made anew for each use, since what it
// once held would order later users too.
class Token : Pinned {
 public:
  Token();
  ~Token();
  void release() const;
  void acquire() const;

 private:
  void* memory_;
};

// While one lives, what the running thread reads, writes and allocates is not looked at: the runtime at work.
class Quiet : Pinned {
 public:
  Quiet();
  ~Quiet();
};

// The threads of one worker's block. To ThreadSanitizer each is a fiber of its own, switched without any ordering. A
// worker takes the fibers of some blocks for a launch and uses them in turn: two blocks that were the same fibers, some
// blocks apart on one worker, look ordered; all others do not.
class Threads : Pinned {
 public:
  Threads();

  // Called by the worker itself. `at_most`: fibers that it may have. What was released to `begins` comes before all
  // that the threads do; what the worker itself does with memory does not.
  void begin_block(unsigned threads, const uint3& block, const uint3* index_of, unsigned at_most, const Token& begins);
  void replace(unsigned thread);       // that has begun and will not go on
  void end_launch(const Token& ends);  // releases all that the threads did

  // From here on, accesses are those of this thread, or of the worker.
  void run(unsigned thread);
  void run_worker();

  // All that the listed threads did comes before all that they will do. `current` runs afterwards.
  void order(const unsigned* threads, unsigned count, unsigned current);
  void release(const unsigned* threads, unsigned count, const Token& token);
  void acquire(const unsigned* threads, unsigned count, const Token& token);

 private:
  void* worker_;
  std::vector<unsigned> ring_;        // fibers, by their numbers
  std::size_t first_ = 0, next_ = 0;  // the place of the block's first thread, and of the next block's
};

// Memory between these addresses is as if nobody had ever used it. Its contents are lost.
void renew(char* begin, char* end);

// An ordinary memset would be taken for accesses of the running thread.
void fill(char* begin, unsigned char value, std::size_t bytes);

// Accesses to a thread's own stack are not looked at: stacks pass from thread to thread.
// It cannot be taken back, so this memory must stay what it is.
void add_stacks(const char* begin, const char* end);

// The races found since the last call, as text, or an empty string.
std::string take_reports();

}  // namespace race

#else

namespace race {

constexpr bool kOn = false;

struct Token {
  Token() {}  // or a constant one would need a value
  void release() const {}
  void acquire() const {}
};
struct Threads {
  void begin_block(unsigned, const uint3&, const uint3*, unsigned, const Token&) {}
  void replace(unsigned) {}
  void end_launch(const Token&) {}
  void run(unsigned) {}
  void run_worker() {}
  void order(const unsigned*, unsigned, unsigned) {}
  void release(const unsigned*, unsigned, const Token&) {}
  void acquire(const unsigned*, unsigned, const Token&) {}
};
struct Quiet {
  Quiet() {}  // so that nobody calls it unused
};
inline void add_stacks(const char*, const char*) {}

}  // namespace race

#endif

// The one object of its type, which lives as long as the program: threads may outlive static objects. Its making is not
// looked at: the guard of a static variable orders the threads that use it, but not where the detector can see it.
template <class T>
T& lasting() {
  static T* const instance = [] {
    const race::Quiet quiet;
    return new T;
  }();
  return *instance;
}

}  // namespace kf::simt
