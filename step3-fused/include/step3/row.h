// A row that a block holds in registers: thread t of n holds the vectors t, t + n, t + 2n, … of N neighbours each.
#pragma once

#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/vector.h>
#include <step3/statistics.h>

#include <cstdint>
#include <string>
#include <type_traits>

namespace kf::KF_BACKEND {

constexpr int kMostRowThreads = 1024;

// How many values a thread holds at most. 8 floats and the addresses fit well into 64 registers, which is what each of
// 1024 threads may use; doubles are twice as large.
template <class T>
constexpr int kMostValues = sizeof(T) == 8 ? 4 : 8;

// For `can_implement`: why rows of that shape cannot be done, a block a row, or "".
inline std::string too_many_or_too_wide(int64_t rows, int64_t width, DType dtype) {
  const int64_t widest =
      int64_t{kMostRowThreads} * (dtype == DType::kFloat64 ? kMostValues<double> : kMostValues<float>);
  if (width > widest) return "takes width ≤ " + std::to_string(widest) + ", got " + std::to_string(width);
  if (rows > INT32_MAX) return "takes rows ≤ " + std::to_string(INT32_MAX) + ", got " + std::to_string(rows);
  return "";
}

// Calls f(i, first column) for this thread's vectors i = 0, 1, … as far as the row goes.
template <int kItems, int N, class F>
__device__ __forceinline__ void for_each_vector(int width, F f) {
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int column = (i * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * N;
    if (column < width) f(i, column);
  }
}

// By all threads of the block; `shared` holds 32 values. Two passes, both over registers.
template <int kItems, int N, class C>
__device__ Statistics<C> block_statistics(const C (&value)[kItems][N], int width, C eps, C* shared) {
  C total = 0;
  for_each_vector<kItems, N>(width, [&](int i, int) {
#pragma unroll
    for (int j = 0; j < N; ++j) total += value[i][j];
  });
  const C mean = block_sum(total, shared) / C(width);
  C sum = 0;
  C sum_of_squares = 0;
  for_each_vector<kItems, N>(width, [&](int i, int) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const C off = value[i][j] - mean;
      sum += off;
      sum_of_squares += off * off;
    }
  });
  sum = block_sum(sum, shared);
  return statistics(mean, sum, block_sum(sum_of_squares, shared), width, eps);
}

// Normalises this thread's part of the row and writes it.
template <int kItems, int N, class T, class C>
__device__ void store_normalized(const C (&value)[kItems][N], const Statistics<C>& s, int width, const T* weight,
                                 const T* bias, T* y) {
  for_each_vector<kItems, N>(width, [&](int i, int column) {
    const Vector<T, N> w = load_vector<N>(weight + column);
    const Vector<T, N> b = load_vector<N>(bias + column);
    Vector<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      out.element[j] = from_compute<T>(s.normalize(value[i][j]) * to_compute(w.element[j]) + to_compute(b.element[j]));
    }
    store_vector<N>(y + column, out);
  });
}

// Calls f with the constants kItems and N, and the number of threads, that suit rows of `width` elements of T. A narrow
// row gives each of up to 256 threads one vector; a wide one gives each thread as many as its registers hold.
template <class T, class F>
void with_row_shape(int64_t width, bool vectors, F&& f) {
  constexpr int kWide = 16 / sizeof(T);
  const auto choose = [&](auto n) {
    constexpr int N = decltype(n)::value;
    constexpr int kMostItems = kMostValues<T> / N;
    const int64_t count = ceil_div(width, N);
    const bool one_each = count <= 256;
    const auto threads = static_cast<unsigned>(ceil_div(ceil_div(count, one_each ? 1 : kMostItems), 32) * 32);
    if (one_each) {
      f(std::integral_constant<int, 1>{}, n, threads);
    } else {
      f(std::integral_constant<int, kMostItems>{}, n, threads);
    }
  };
  if (vectors && width % kWide == 0) {
    choose(std::integral_constant<int, kWide>{});
  } else {
    choose(std::integral_constant<int, 1>{});
  }
}

}  // namespace kf::KF_BACKEND
