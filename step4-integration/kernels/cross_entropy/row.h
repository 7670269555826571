// What the rungs share: a row and its target, and how a row that begins anywhere is cut into vectors.
#pragma once

#include <cuda_runtime.h>
#include <kf/launch.h>
#include <kf/numeric.h>
#include <kf/rung.h>
#include <step1/vector.h>
#include <step2/online_softmax.h>
#include <step2/reduce.h>

#include <cstdint>
#include <string>

#include "rungs.h"

namespace kf::KF_BACKEND::cross_entropy {

// Args with their types. No `__restrict__`: the gradient may be written over the logits.
template <class T>
struct Rows {
  using C = compute_t<T>;
  const T* logits;
  const int64_t* targets;
  C *loss, *lse;
  T* grad;
  int64_t width, logits_stride, grad_stride, ignore_index;

  explicit Rows(const Args& a)
      : logits(static_cast<const T*>(a.logits)),
        targets(a.targets),
        loss(static_cast<C*>(a.loss)),
        lse(static_cast<C*>(a.lse)),
        grad(static_cast<T*>(a.grad)),
        width(a.width),
        logits_stride(a.logits_stride),
        grad_stride(a.grad_stride),
        ignore_index(a.ignore_index) {}
};

// A block's row.
template <class T>
struct Row {
  using C = compute_t<T>;
  const T* logits;
  T* grad;  // null: not wanted
  C *loss, *lse;
  int64_t width, target;
  bool ignored;
  C at_target;  // the target's logit, read before anything is written over it; NaN where the row has none such
  C weight;     // of the gradient: 1, or 0 where the target is ignored, NaN where there is none such

  __device__ Row(const Rows<T>& a, int64_t row)
      : logits(a.logits + row * a.logits_stride),
        grad(a.grad == nullptr ? nullptr : a.grad + row * a.grad_stride),
        loss(a.loss + row),
        lse(a.lse == nullptr ? nullptr : a.lse + row),
        width(a.width),
        target(a.targets[row]),
        ignored(target == a.ignore_index) {
    const bool valid = target >= 0 && target < width;
    at_target = valid ? to_compute(logits[target]) : C(NAN);
    weight = ignored ? C(0) : valid ? C(1) : C(NAN);
  }

  // True where nothing that the row holds is wanted: then it is not read, and its gradient is 0 whatever it holds.
  __device__ bool skip() const {
    if (!ignored || lse != nullptr) return false;
    if (threadIdx.x == 0) *loss = 0;
    if (grad != nullptr) {
      for (int64_t c = threadIdx.x; c < width; c += blockDim.x) grad[c] = from_compute<T>(C(0));
    }
    return true;
  }

  // `sum` of exp(logit − max). The loss is not lse − logit: where logits are great, that would cancel.
  __device__ void write_loss(C max, C sum) const {
    if (threadIdx.x != 0) return;
    *loss = ignored ? C(0) : logarithm(sum) - (at_target - max);
    if (lse != nullptr) *lse = max + logarithm(sum);
  }
};

// A row of −∞ alone has no maximum to subtract: −∞ − (−∞) would be NaN. So its sum is 0, and its lse −∞.
template <class C>
__device__ __forceinline__ C finite(C max) {
  return max == C(-INFINITY) ? C(0) : max;
}

// One multiplication and one instruction for exp: x − max is exact enough, and at most 0.
__device__ __forceinline__ float weight_of(float x, float max) {
  return exp2_approx((x - max) * static_cast<float>(kLog2e));
}
__device__ __forceinline__ double weight_of(double x, double max) { return exponential(x - max); }

// A row in vectors of 16 bytes, from column `begin` to `end`. Where it does not begin or end at a multiple of 16 bytes
// fewer than N values are left on either side: one for each of the first threads.
template <class T>
struct Cut {
  static constexpr int N = 16 / sizeof(T);
  int begin, end, width;

  __device__ Cut(const T* row, int width) : width(width) {
    const int beyond = static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % N);
    begin = min((N - beyond) % N, width);
    end = begin + (width - begin) / N * N;
  }

  // The column of the single value that a thread takes; `width` where there is none for it.
  __device__ int single(int thread) const { return min(thread < begin ? thread : end + thread - begin, width); }
};

// The gradients of N neighbours from column `first` on, of which `value` has exp(logit − max); `factor` is weight /
// sum. kAligned: they can be stored as a vector.
template <bool kAligned, class T, int N>
__device__ __forceinline__ void write_gradient(const Row<T>& row, compute_t<T> (&value)[N], int first,
                                               compute_t<T> factor) {
#pragma unroll
  for (int j = 0; j < N; ++j) value[j] *= factor;
  if (row.target >= first && row.target < first + N) {  // one thread of all
#pragma unroll
    for (int j = 0; j < N; ++j) value[j] -= first + j == row.target ? row.weight : compute_t<T>(0);
  }
  store_values<kAligned>(row.grad + first, value);
}

// The end of a row whose whole vectors are `kept` in shared memory, each by the thread that reads it here: `max` and
// `sum` of a thread's columns, `alone` its single logit or −∞, become the row's loss, and its gradient is made of them.
template <class T>
__device__ __forceinline__ void finish_kept_row(const Row<T>& row, const Cut<T>& cut, const T* kept, compute_t<T> alone,
                                                compute_t<T> max, compute_t<T> sum, bool alike) {
  using C = compute_t<T>;
  constexpr int N = Cut<T>::N;
  __shared__ C shared[kWarpSize];
  const int threads = blockDim.x, thread = threadIdx.x;
  const int vectors = (cut.end - cut.begin) / N, single = cut.single(thread);
  const C of_thread = max;
  max = finite(block_max(of_thread, shared));
  sum = block_sum(sum * weight_of(of_thread, max), shared);

  row.write_loss(max, sum);
  if (row.grad == nullptr) return;
  const C factor = row.weight / sum;
#pragma unroll 2
  for (int i = thread; i < vectors; i += threads) {
    C value[N];
    widen(load_vector<N>(kept + i * N), value);
#pragma unroll
    for (int j = 0; j < N; ++j) value[j] = weight_of(value[j], max);
    alike ? write_gradient<true>(row, value, cut.begin + i * N, factor)
          : write_gradient<false>(row, value, cut.begin + i * N, factor);
  }
  if (single < cut.width) {
    C value[1] = {weight_of(alone, max)};
    write_gradient<false>(row, value, single, factor);
  }
}

// Whether gradients can be stored in vectors where logits are loaded so.
inline bool alike(const Args& a) {
  const int64_t apart = reinterpret_cast<intptr_t>(a.grad) - reinterpret_cast<intptr_t>(a.logits);
  return apart % 16 == 0 && (a.grad_stride - a.logits_stride) * size_of(a.dtype) % 16 == 0;
}

// Why a grid cannot have a block for each row, or the columns are too many to be counted by int; or "".
inline std::string can_implement_a_block_a_row(const Args& a) {
  if (a.rows > INT32_MAX) return "takes at most 2147483647 rows, got " + std::to_string(a.rows);
  if (a.width > INT32_MAX / 2) return "takes rows of at most 1073741823 logits, got " + std::to_string(a.width);
  return "";
}

// The whole vectors of a row, wherever it begins.
inline int64_t kept_bytes(const Args& a) { return a.width * size_of(a.dtype) / 16 * 16; }

// Besides, why a row does not fit into shared memory.
inline std::string can_implement_a_kept_row(const Args& a) {
  const std::string why_not = can_implement_a_block_a_row(a);
  constexpr int64_t kReductions = kWarpSize * sizeof(double);
  return why_not.empty() ? too_much_shared_memory(kept_bytes(a) + kReductions, "a row") : why_not;
}

}  // namespace kf::KF_BACKEND::cross_entropy
