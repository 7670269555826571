// What the rungs share: which columns a row sees, and, from v4 on, how a row that begins anywhere is cut into vectors.
#pragma once

#include <cuda_runtime.h>
#include <kf/rung.h>
#include <step1/vector.h>
#include <step2/online_softmax.h>

#include <cstdint>
#include <string>

#include "rungs.h"

namespace kf::KF_BACKEND::softmax {

// How many columns a row sees: the first ones, all or, under the causal mask, up to the corner where the square's last
// row sees all. `q_length` is how many rows a square has; 0 says that there is no mask.
__device__ inline int64_t columns_seen(int64_t row, int64_t width, int64_t q_length) {
  if (q_length == 0) return width;
  const int64_t seen = row % q_length + 1 + width - q_length;
  return seen > 0 ? seen : 0;
}

// Of neighbours from column `first` on, those that the row does not see become `instead`.
template <int N, class C, class Column>
__device__ __forceinline__ void hide(C (&value)[N], Column first, Column seen, C instead) {
  if (first + N <= seen) return;  // most of them: one comparison for N values
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (first + j >= seen) value[j] = instead;
  }
}

// A score, rounded before anything is done with it. As x * scale it would be rounded where the maximum is taken, but
// not where nvcc makes one FMA of the product and a subtraction: a great score would no longer be at most its maximum.
__device__ __forceinline__ float score_of(float x, float scale) { return __fmul_rn(x, scale); }
__device__ __forceinline__ double score_of(double x, double scale) { return __dmul_rn(x, scale); }

// The scores of neighbours from column `first` on; −∞, which weighs nothing, for those that the row does not see.
template <int N, class T, class Column>
__device__ __forceinline__ void scores_of(const Vector<T, N>& x, compute_t<T> scale, Column first, Column seen,
                                          compute_t<T> (&score)[N]) {
  widen(x, score);
#pragma unroll
  for (int j = 0; j < N; ++j) score[j] = score_of(score[j], scale);
  hide(score, first, seen, compute_t<T>(-INFINITY));
}

// One multiplication and one instruction for exp: x − max is exact enough, and at most 0.
__device__ __forceinline__ float weight_of(float x, float max) {
  return exp2_approx((x - max) * static_cast<float>(kLog2e));
}
__device__ __forceinline__ double weight_of(double x, double max) { return exponential(x - max); }

// Whether rows of the one begin as far from a multiple of 16 bytes as rows of the other do.
inline bool alike(const void* one, const void* other) {
  return (reinterpret_cast<uintptr_t>(one) - reinterpret_cast<uintptr_t>(other)) % 16 == 0;
}

// How many vectors of 16 bytes a row has, and a value or two beside them where it begins or ends within one.
template <class Args>
int64_t vectors_of(const Args& a) {
  return a.width * size_of(a.dtype) / 16;
}

// Why a grid cannot have a block for each row, or "".
inline std::string can_implement_a_block_a_row(int64_t rows) {
  return rows <= INT32_MAX ? "" : "takes at most 2147483647 rows, got " + std::to_string(rows);
}

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

}  // namespace kf::KF_BACKEND::softmax
