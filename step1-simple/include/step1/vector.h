// 128-bit loads and stores: four floats, or eight halves, in one instruction.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

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

// True where all pointers allow 128-bit access. A tensor cut out of another may start at any element.
template <class... Pointers>
bool aligned_16(Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

}  // namespace kf::KF_BACKEND
