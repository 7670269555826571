// A loop on several cores by OpenMP, without torch; on one core where a compiler has no OpenMP.
#pragma once

#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

namespace kf::cpu {

// How many threads the loops of this thread take; 0 is OpenMP's own number, from OMP_NUM_THREADS or the cores.
inline thread_local int chosen_threads = 0;

// Chooses it for as long as this lives. In torch's extensions the host does, by torch.get_num_threads(): see kf/host.h.
class Threads {
  const int before_ = chosen_threads;

 public:
  explicit Threads(int count) { chosen_threads = count; }
  ~Threads() { chosen_threads = before_; }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;
};

inline int num_threads() {
#ifdef _OPENMP
  if (omp_in_parallel()) return 1;
  return chosen_threads > 0 ? chosen_threads : omp_get_max_threads();
#else
  return 1;
#endif
}

// f(first, last) for parts of begin ≤ i < end that are equal but for the last one, each of at least `grain` where there
// is so much, on a thread each. What one of them throws comes out here.
template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& f) {
  if (begin >= end) return;
#ifdef _OPENMP
  const int64_t count = end - begin;
  if (const int threads = num_threads(); threads > 1 && count > std::max<int64_t>(grain, 1)) {
    std::atomic_flag failed = ATOMIC_FLAG_INIT;
    std::exception_ptr error;
    // All threads at every loop, for libgomp ends and begins threads where their number changes; not all get a part.
#pragma omp parallel num_threads(threads)
    {
      const int64_t most = grain > 0 ? (count + grain - 1) / grain : count;
      const int64_t parts = std::min<int64_t>(omp_get_num_threads(), most), size = (count + parts - 1) / parts;
      const int64_t first = begin + omp_get_thread_num() * size;
      if (first < end) {
        try {
          f(first, std::min(end, first + size));
        } catch (...) {
          if (!failed.test_and_set()) error = std::current_exception();
        }
      }
    }
    if (error) std::rethrow_exception(error);
    return;
  }
#endif
  f(begin, end);
}

}  // namespace kf::cpu
