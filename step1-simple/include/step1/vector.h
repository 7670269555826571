// 128-bit loads and stores: four floats, or eight halves, in one instruction.
#pragma once

#include <cuda_runtime.h>
#include <kf/numeric.h>

#include <cstdint>
#include <type_traits>

namespace kf::KF_BACKEND {

// N neighbours in registers. With N * sizeof(T) == 16 a load or store is one 128-bit instruction.
template <class T, int N>
struct alignas(N * sizeof(T)) Vector {
  T element[N];
};

template <int N, class T>
__device__ __forceinline__ Vector<T, N> load_vector(const T* from) {
  return *reinterpret_cast<const Vector<T, N>*>(from);
}

template <int N, class T>
__device__ __forceinline__ void store_vector(T* to, const Vector<T, N>& vector) {
  *reinterpret_cast<Vector<T, N>*>(to) = vector;
}

// The same with the hint "streaming": this line will not be used again, so evict it first.
template <int N, class T>
__device__ __forceinline__ Vector<T, N> load_vector_streaming(const T* from) {
  Vector<T, N> vector;
  if constexpr (N * sizeof(T) == 16) {
    *reinterpret_cast<int4*>(&vector) = __ldcs(reinterpret_cast<const int4*>(from));
  } else {
    vector = load_vector<N>(from);
  }
  return vector;
}

template <int N, class T>
__device__ __forceinline__ void store_vector_streaming(T* to, const Vector<T, N>& vector) {
  if constexpr (N * sizeof(T) == 16) {
    __stcs(reinterpret_cast<int4*>(to), *reinterpret_cast<const int4*>(&vector));
  } else {
    store_vector<N>(to, vector);
  }
}

// N values to be computed with, and back. Half types are rounded two at a time: one instruction for both.
template <class T, int N>
__device__ __forceinline__ void widen(const Vector<T, N>& vector, compute_t<T> (&value)[N]) {
#pragma unroll
  for (int j = 0; j < N; ++j) value[j] = to_compute(vector.element[j]);
}

template <class T, int N>
__device__ __forceinline__ Vector<T, N> narrow(const compute_t<T> (&value)[N]) {
  Vector<T, N> vector;
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
#pragma unroll
    for (int j = 0; j < N; j += 2) round_pair(value[j], value[j + 1], vector.element[j], vector.element[j + 1]);
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) vector.element[j] = from_compute<T>(value[j]);
  }
  return vector;
}

// M values from an address, and back: in pieces of 16 bytes where kAligned says that they may be, else one by one.
template <bool kAligned, int M, class T>
__device__ __forceinline__ void load_values(const T* from, compute_t<T> (&value)[M]) {
  constexpr int N = kAligned ? 16 / sizeof(T) : 1;
#pragma unroll
  for (int k = 0; k < M; k += N) {
    const Vector<T, N> vector = load_vector<N>(from + k);
#pragma unroll
    for (int j = 0; j < N; ++j) value[k + j] = to_compute(vector.element[j]);
  }
}

template <bool kAligned, class T, int M>
__device__ __forceinline__ void store_values(T* to, const compute_t<T> (&value)[M]) {
  constexpr int N = kAligned ? 16 / sizeof(T) : 1;
#pragma unroll
  for (int k = 0; k < M; k += N) {
    compute_t<T> piece[N];
#pragma unroll
    for (int j = 0; j < N; ++j) piece[j] = value[k + j];
    store_vector<N>(to + k, narrow<T>(piece));
  }
}

// Of eight values those from `first` to `last`; the others are 0, or stay as they are in memory. `whole` says that all
// eight are meant, as std::true_type or std::false_type: who decides that once for several loads keeps them free of
// branches, so that they are in flight together.
template <bool kAligned, class Whole, class T>
__device__ __forceinline__ void load_some(Whole whole, const T* from, int first, int last, compute_t<T> (&value)[8]) {
  if constexpr (decltype(whole)::value) {
    load_values<kAligned>(from, value);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) value[j] = j >= first && j < last ? to_compute(from[j]) : compute_t<T>(0);
  }
}

template <bool kAligned, class Whole, class T>
__device__ __forceinline__ void store_some(Whole whole, T* to, int first, int last, const compute_t<T> (&value)[8]) {
  if constexpr (decltype(whole)::value) {
    store_values<kAligned>(to, value);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j >= first && j < last) to[j] = from_compute<T>(value[j]);
    }
  }
}

// True where all pointers allow 128-bit access. A tensor cut out of another may start at any element.
template <class... Pointers>
bool aligned_16(Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

}  // namespace kf::KF_BACKEND
