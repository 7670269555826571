// What may stand in front of a residual's addition: dropout(x + x_bias), as a transformer has it after a projection.
//
// A kernel takes a front as a template parameter, Front or NoFront, and its launcher calls with_front to choose:
//
//   front.read();                                    once a thread, before anything else
//   front.apply(first + column, column, value);      value: N elements of x in registers, widened
//   value[j] += …                                    what is added to the residual
//
// Which N neighbours a thread holds is the kernel's business. With NoFront nothing is left of these lines.
#pragma once

#include <kf/numeric.h>
#include <step1/vector.h>
#include <step3/dropout.h>

#include <cstdint>
#include <type_traits>

namespace kf::KF_BACKEND {

// N neighbours as they lie in memory, in words where they are 16 bytes. As elements of a half type nvcc would take them
// apart where they are loaded, and across a front's branches each would have a register to itself.
template <class T, int N>
struct Words {
  std::conditional_t<N * sizeof(T) == 16, uint4, Vector<T, N>> words = {};
};

template <class T, int N>
__device__ __forceinline__ void widen(const Words<T, N>& words, compute_t<T> (&value)[N]) {
  widen(reinterpret_cast<const Vector<T, N>&>(words), value);
}

template <class Loaded, class T>
__device__ __forceinline__ Loaded load_as(const T* from) {
  return *reinterpret_cast<const Loaded*>(from);
}

struct NoFront {
  // What N neighbours are loaded into that wait in registers while the front is applied.
  template <class T, int N>
  using Loaded = Vector<T, N>;

  __device__ __forceinline__ void read() {}
  template <int N, class C>
  __device__ __forceinline__ void apply(int64_t, int64_t, C (&)[N]) const {}
};

template <class T>
struct Front {
  using C = compute_t<T>;
  template <class, int N>
  using Loaded = Words<T, N>;

  const T* x_bias;  // [width], or null: nothing is added
  ElementwiseDropout<C> dropout;

  __device__ __forceinline__ void read() { dropout.read(); }

  // value: N neighbours in a row of x, which begin at element `element` of all and at column `column` of their row. N
  // is at most 16 / sizeof(T) and divides 8 and `element`. From x_bias they are one load, of 16 bytes where N is the
  // most: then the launcher sees to it, by aligned_16, that x_bias may be read so. It comes from cache, and only now,
  // so that it takes no registers from rows that are in flight. Nothing is rounded in between.
  template <int N>
  __device__ __forceinline__ void apply(int64_t element, int64_t column, C (&value)[N]) const {
    if (x_bias != nullptr) {
      C bias[N];
      widen(load_vector<N>(x_bias + column), bias);
#pragma unroll
      for (int j = 0; j < N; ++j) value[j] += bias[j];
    }
    dropout.apply_aligned(element, value);
  }
};

// Calls f(front) with the front that `a` asks for: an op's Args with x_bias, threshold, rng_state, seed and offset.
template <class T, class Args, class F>
void with_front(const Args& a, F&& f) {
  if (a.x_bias == nullptr && a.threshold == 0) {
    f(NoFront{});
  } else {
    using C = compute_t<T>;
    f(Front<T>{static_cast<const T*>(a.x_bias),
               ElementwiseDropout<C>{{a.rng_state, a.seed, a.offset}, a.threshold, keep_scale<C>(a.threshold)}});
  }
}

}  // namespace kf::KF_BACKEND
