// What the rungs share: a row's scores, the integers that they become, and what is written in the end.
//
// A row without a distribution gives token −1 and a log-probability of NaN: one that holds a NaN, or whose greatest
// score is +∞ or −∞.
#pragma once

#include <cuda_runtime.h>
#include <kf/numeric.h>
#include <math.h>
#include <step1/philox.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "rungs.h"

namespace kf::KF_BACKEND::sample {

using kf::sample::kWeightBits;

// ---- scores ----

// Rounded by themselves: as one FMA with the subtraction of the maximum they would be other numbers on a GPU.
__device__ __forceinline__ float product(float x, float y) { return __fmul_rn(x, y); }
__device__ __forceinline__ double product(double x, double y) { return __dmul_rn(x, y); }

template <class T>
struct Row {
  const T* logits;
  const uint8_t* seen;  // null where nothing is penalised
  compute_t<T> penalty;

  __device__ Row(const Args& a, int64_t row)
      : logits(static_cast<const T*>(a.logits) + row * a.stride),
        seen(a.seen == nullptr || a.repetition_penalty == 1 ? nullptr : a.seen + row * a.seen_stride),
        penalty(static_cast<compute_t<T>>(a.repetition_penalty)) {}

  __device__ __forceinline__ compute_t<T> raw(int64_t column) const { return to_compute(logits[column]); }
  __device__ __forceinline__ bool penalised(int64_t column) const { return seen != nullptr && seen[column] != 0; }
  __device__ __forceinline__ compute_t<T> score_of(compute_t<T> x, bool penalised) const {
    return !penalised ? x : x < 0 ? product(x, penalty) : x / penalty;
  }
  __device__ __forceinline__ compute_t<T> score(int64_t column) const {
    return score_of(raw(column), penalised(column));
  }

  // f(column, logit, score) for a lane's columns of begin to end − 1, which are 32 apart. Eight loads are in flight
  // together: what f stores could, for all the compiler knows, be what is loaded next.
  template <class F>
  __device__ __forceinline__ void for_columns(int begin, int end, F f) const {
    constexpr int kLoads = 8, kWarp = 32;
    for (int first = begin + static_cast<int>(threadIdx.x) % kWarp; first < end; first += kLoads * kWarp) {
      compute_t<T> x[kLoads];
      bool is_penalised[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int c = min(first + i * kWarp, end - 1);
        x[i] = raw(c), is_penalised[i] = penalised(c);
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (first + i * kWarp < end) f(first + i * kWarp, x[i], score_of(x[i], is_penalised[i]));
      }
    }
  }
};

// ---- keys: integers in the order of the scores; equal scores, −0 and +0 among them, have equal keys ----

template <class C>
using Key = std::conditional_t<std::is_same_v<C, double>, uint64_t, uint32_t>;
template <class K>
constexpr int kBits = 8 * sizeof(K);
template <class K>
constexpr K kSign = K(1) << (kBits<K> - 1);

__device__ __forceinline__ uint32_t bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ uint64_t bits_of(double x) { return static_cast<uint64_t>(__double_as_longlong(x)); }
__device__ __forceinline__ float from_bits(uint32_t bits) { return __uint_as_float(bits); }
__device__ __forceinline__ double from_bits(uint64_t bits) { return __longlong_as_double(static_cast<int64_t>(bits)); }

template <class C>
__device__ __forceinline__ Key<C> key_of(C score) {
  const Key<C> bits = bits_of(score);
  if (score == 0) return kSign<Key<C>>;
  return bits & kSign<Key<C>> ? ~bits : bits | kSign<Key<C>>;
}
// Below this bit the keys of logits of type T are all alike, as long as nothing is penalised: a half type as a float
// ends in zeros. A multiple of 8.
template <class T>
constexpr int kLowestBit = std::is_same_v<T, __nv_bfloat16> ? 16
                           : std::is_same_v<T, __half>      ? 8
                                                            : 0;

template <class K>
__device__ __forceinline__ auto score_of(K key) {
  return from_bits(key & kSign<K> ? key & ~kSign<K> : static_cast<K>(~key));
}

// ---- weights: probabilities relative to the likeliest token's, in 2⁻³⁵ths ----

// Taylor's polynomial of e^r, from r^k/k! on, divided by r^k.
template <int k>
constexpr double kInverseFactorial = kInverseFactorial<k - 1> / k;
template <>
constexpr double kInverseFactorial<0> = 1;
template <int k, int kLast, class C>
__device__ __forceinline__ C taylor(C r) {
  constexpr C kFactor = C(kInverseFactorial<k>);
  if constexpr (k == kLast) {
    return kFactor;
  } else {
    return fma(taylor<k + 1, kLast>(r), r, kFactor);
  }
}

// e^difference of a difference up to 0, times 2³⁵, rounded; 0 below e⁻²⁶. Every operation rounds as IEEE 754 says, and
// so does plain C++'s version: expf is not the same on a CPU and on a GPU. n·ln 2 is taken off, ln 2 being in two
// parts; n goes into the exponent's bits.
template <class C>
__device__ __forceinline__ uint64_t weight_of(C difference) {
  constexpr bool kDouble = std::is_same_v<C, double>;
  if (!(difference >= C(-26))) return 0;
  const C n = rint(product(difference, C(1.4426950408889634)));
  C r = fma(-n, kDouble ? C(6.93147180369123816490e-01) : C(0.693359375), difference);
  r = fma(-n, kDouble ? C(1.90821492927058770002e-10) : C(-2.12194440e-4), r);
  const auto exponent = static_cast<Key<C>>(static_cast<int>(n) + kWeightBits + (kDouble ? 1023 : 127));
  const C scale = from_bits(static_cast<Key<C>>(exponent << (kDouble ? 52 : 23)));
  return static_cast<uint64_t>(static_cast<int64_t>(taylor<0, kDouble ? 13 : 7>(r) * scale + C(0.5)));
}

// ---- what is asked of a row ----

template <class C>
struct Rule {
  C temperature;
  bool greedy;
  uint64_t top_k;  // 0: all
  double top_p;
  uint64_t least_weight;  // min_p's

  explicit Rule(const Args& a)
      : temperature(static_cast<C>(a.temperature)),
        greedy(temperature == 0),
        top_k(a.top_k < a.width ? static_cast<uint64_t>(a.top_k) : 0),
        top_p(a.top_p),
        least_weight(static_cast<uint64_t>(std::ceil(std::ldexp(a.min_p, kWeightBits)))) {}

  __device__ __forceinline__ uint64_t weight(C score, C max) const { return weight_of((score - max) / temperature); }
  // The weight that the most likely tokens must reach together.
  __device__ __forceinline__ uint64_t target(uint64_t total) const {
    const auto part = static_cast<uint64_t>(ceil(__dmul_rn(static_cast<double>(total), top_p)));
    return part > 0 ? part : 1;
  }
};

// A row's 64 random bits: Philox's for its seed and offset, of which 2⁶² are different. A kernel takes them before the
// barrier behind which one thread counts the offset up. Of a sum of weights, __umul64hi(bits, sum) is a random number
// below it.
__device__ __forceinline__ uint64_t random_bits(const int64_t* rng_state) {
  const uint4 bits = philox(static_cast<uint64_t>(rng_state[0]), static_cast<uint64_t>(rng_state[1]) << 2 >> 2, 0);
  return uint64_t{bits.y} << 32 | bits.x;
}

// One thread's last act. raw_sum: of the weights of the logits as they came.
template <class T>
__device__ void finish(const Args& a, int64_t row, bool greedy, int64_t token, compute_t<T> raw_max, uint64_t raw_sum) {
  if (!greedy) a.rng_state[2 * row + 1] += 1;
  a.token[row] = token;
  float log_prob = NAN;
  if (token >= 0) {
    const double x = static_cast<double>(to_compute(static_cast<const T*>(a.logits)[row * a.stride + token]));
    log_prob =
        static_cast<float>(x - static_cast<double>(raw_max) - log(ldexp(static_cast<double>(raw_sum), -kWeightBits)));
    if (a.seen != nullptr) a.seen[row * a.seen_stride + token] = 1;
  }
  a.log_prob[row] = log_prob;
}

}  // namespace kf::KF_BACKEND::sample
