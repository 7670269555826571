// A row that its threads hold in registers from one read to the write: thread t of kThreads holds the pieces t,
// t + kThreads, … of N neighbours each. All three are constants, so that loops unroll and arrays become registers.
#pragma once

#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/vector.h>
#include <step3/statistics.h>

#include <cstdint>
#include <string>
#include <type_traits>

namespace kf::KF_BACKEND {

template <int kThreads_, int kItems_, int N_>
struct HeldRow {
  static constexpr int kThreads = kThreads_;
  static constexpr int kItems = kItems_;
  static constexpr int N = N_;

  // Calls f(i, first column) for this thread's pieces as far as the row goes.
  template <class F>
  __device__ __forceinline__ static void for_each_piece(int width, F f) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int column = (i * kThreads + static_cast<int>(threadIdx.x)) * N;
      if (column < width) f(i, column);
    }
  }
};

// Hides from the compiler that the bits of a vector stay the same.
template <class V>
__device__ __forceinline__ void forget(V& v) {
  if constexpr (sizeof(V) == 16) {
    int4& bits = reinterpret_cast<int4&>(v);
    asm volatile("" : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w));
  }
}

// Widens a vector that is held as it came, for each pass anew. Left alone nvcc would widen the values of a half type
// once and keep them as floats, in twice the registers. And a bfloat16 is the upper half of its float: of two in a word
// nvcc takes the upper one down and up again, where one instruction is enough.
template <class T, int N>
__device__ __forceinline__ void widen_anew(Vector<T, N>& vector, compute_t<T> (&value)[N]) {
  forget(vector);
  if constexpr (std::is_same_v<T, __nv_bfloat16> && N % 2 == 0) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(vector.element);
#pragma unroll
    for (int j = 0; j < N; j += 2) {
      value[j] = __uint_as_float(words[j / 2] << 16);
      value[j + 1] = __uint_as_float(words[j / 2] & 0xffff0000u);
    }
  } else {
    widen(vector, value);
  }
}
template <class T, int N>
__device__ __forceinline__ void widen_anew(Vector<T, N>&& loaded, compute_t<T> (&value)[N]) {
  widen_anew(loaded, value);
}

// Adds up kCount values each over the threads of a row, which all get the sums. A warp does it by shuffles. More warps
// meet at one barrier, by calling `sync`: `shared`, kCount values for each warp, must be another one for each call, or
// a barrier must lie between.
template <int kThreads, int kCount, class C, class Sync>
__device__ __forceinline__ void row_sums(C (&value)[kCount], C* shared, Sync sync) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) value[k] = warp_sum(value[k]);
  if constexpr (kThreads > kWarpSize) {
    constexpr int kWarps = kThreads / kWarpSize;
    if (threadIdx.x % kWarpSize == 0) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) shared[k * kWarps + threadIdx.x / kWarpSize] = value[k];
    }
    sync();
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      value[k] = shared[k * kWarps];
#pragma unroll
      for (int warp = 1; warp < kWarps; ++warp) value[k] += shared[k * kWarps + warp];
    }
  }
}

// Mean and rstd of a row in registers, of which get(i, values) gives a thread's piece: two passes over them, two
// meetings. `shared`: three values for each warp.
template <class Row, class C, class Get>
__device__ __forceinline__ Statistics<C> held_statistics(Get get, int width, C eps, C* shared) {
  C total[1] = {};
  Row::for_each_piece(width, [&](int i, int) {
    C value[Row::N];
    get(i, value);
#pragma unroll
    for (int j = 0; j < Row::N; ++j) total[0] += value[j];
  });
  row_sums<Row::kThreads>(total, shared, [] { __syncthreads(); });
  const C mean = total[0] / C(width);
  C off[2] = {};  // the sum of x − mean, and of its square
  Row::for_each_piece(width, [&](int i, int) {
    C value[Row::N];
    get(i, value);
#pragma unroll
    for (int j = 0; j < Row::N; ++j) {
      const C d = value[j] - mean;
      off[0] += d;
      off[1] += d * d;
    }
  });
  row_sums<Row::kThreads>(off, shared + Row::kThreads / kWarpSize, [] { __syncthreads(); });
  return statistics(mean, off[0], off[1], width, eps);
}

// When the threads of a row ask for weight and bias: a piece of each where it is needed, or all before the first is,
// for which there must be registers.
enum class LoadWeights { kWhereNeeded, kAtOnce };

// Normalises this thread's pieces, of which get(i, values) gives one, and writes them. Weight and bias come from cache,
// and only now: earlier they would take registers from the rows that are being loaded.
template <class Row, LoadWeights kLoadWeights, class C, class T, class Get>
__device__ __forceinline__ void store_pieces(Get get, const Statistics<C>& s, int width, const T* weight, const T* bias,
                                             T* y) {
  Vector<T, Row::N> weights[Row::kItems], biases[Row::kItems];
  const auto load = [&](int i, int column) {
    weights[i] = load_vector<Row::N>(weight + column);
    biases[i] = load_vector<Row::N>(bias + column);
  };
  if constexpr (kLoadWeights == LoadWeights::kAtOnce) Row::for_each_piece(width, load);
  Row::for_each_piece(width, [&](int i, int column) {
    if constexpr (kLoadWeights == LoadWeights::kWhereNeeded) load(i, column);
    C value[Row::N], w[Row::N], b[Row::N], out[Row::N];
    get(i, value);
    widen_anew(weights[i], w);
    widen_anew(biases[i], b);
#pragma unroll
    for (int j = 0; j < Row::N; ++j) out[j] = s.normalize(value[j]) * w[j] + b[j];
    store_vector<Row::N>(y + column, narrow<T>(out));
  });
}

// Gives the pieces of a row that is held as floats.
template <class Row, class C>
struct HeldValues {
  const C (&value)[Row::kItems][Row::N];

  __device__ __forceinline__ void operator()(int i, C (&piece)[Row::N]) const {
#pragma unroll
    for (int j = 0; j < Row::N; ++j) piece[j] = value[i][j];
  }
};

// How many rows a block takes, a warp each: few, so that a block ends, and the next begins, early.
template <class Row>
constexpr int kRowsOfBlock = Row::kThreads > kWarpSize   ? 1
                             : Row::kItems * Row::N > 16 ? 2
                                                         : 4;

// For `can_implement`: why rows of that shape cannot be held, or "". 512 threads hold 32 values each, of float64 16.
inline std::string too_many_or_too_wide_to_hold(int64_t rows, int64_t width, DType dtype) {
  const int64_t widest = dtype == DType::kFloat64 ? 8192 : 16384;
  if (width > widest) return "takes width ≤ " + std::to_string(widest) + ", got " + std::to_string(width);
  if (rows > INT32_MAX) return "takes rows ≤ " + std::to_string(INT32_MAX) + ", got " + std::to_string(rows);
  return "";
}

// Calls f(HeldRow) with the shape that suits rows of `width` elements of T: a warp up to 4 KB,
// or up to 1024 values without vectors, then a block.
template <class T, class F>
void with_held_row(int64_t width, bool vectors, F&& f) {
  constexpr int N = 16 / sizeof(T);
  if (vectors && width % N == 0) {
    const int64_t count = width / N;
    count <= 32     ? f(HeldRow<32, 1, N>{})
    : count <= 64   ? f(HeldRow<32, 2, N>{})
    : count <= 96   ? f(HeldRow<32, 3, N>{})
    : count <= 128  ? f(HeldRow<32, 4, N>{})
    : count <= 160  ? f(HeldRow<32, 5, N>{})
    : count <= 192  ? f(HeldRow<32, 6, N>{})
    : count <= 224  ? f(HeldRow<32, 7, N>{})
    : count <= 256  ? f(HeldRow<32, 8, N>{})
    : count <= 512  ? f(HeldRow<128, 4, N>{})
    : count <= 1024 ? f(HeldRow<128, 8, N>{})
    : count <= 2048 ? f(HeldRow<256, 8, N>{})
                    : f(HeldRow<512, 8, N>{});
  } else {  // value by value: neighbouring lanes still read neighbouring columns
    width <= 256    ? f(HeldRow<32, 8, 1>{})
    : width <= 1024 ? f(HeldRow<32, 32, 1>{})
    : width <= 2048 ? f(HeldRow<64, 32, 1>{})
    : width <= 8192 ? f(HeldRow<256, 32, 1>{})
                    : f(HeldRow<512, 32, 1>{});
  }
}

}  // namespace kf::KF_BACKEND
