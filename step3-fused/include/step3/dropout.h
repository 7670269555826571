// Dropout of neighbours in registers, with the mask of step 1's bias_dropout_residual: element i of a tensor gets
// random number i.
#pragma once

#include <step1/philox.h>

namespace kf::KF_BACKEND {

template <class C>
struct ElementwiseDropout {
  PhiloxState philox_state;
  uint32_t threshold;  // an element is kept where its 16-bit random number is at least this; 0: all are
  C scale;

  // For who applies it many times: a state that lies in the GPU's memory is read once, here.
  __device__ __forceinline__ void read() {
    philox_state.read();
    philox_state.in_memory = nullptr;
  }

  // Of N neighbours, the first being element `first` of all. N divides 8, for which a call makes numbers, and `first`
  // is a multiple of N: all of one call.
  template <int N>
  __device__ __forceinline__ void apply_aligned(int64_t first, C (&value)[N]) const {
    static_assert(8 % N == 0);
    if (threshold == 0) return;
    const Eight eight = call(first / 8);
    const int begin = static_cast<int>(static_cast<uint32_t>(first) / N * N % 8);
#pragma unroll
    for (int j = 0; j < N; ++j) value[j] = kept(value[j], eight.number(begin + j));
  }

  // Of eight neighbours that begin anywhere.
  __device__ __forceinline__ void apply(int64_t first, C (&value)[8]) const {
    if (threshold == 0) return;
    if (first % 8 == 0) return apply_aligned(first, value);
#pragma unroll 1
    for (int64_t i = first / 8; i <= first / 8 + 1; ++i) {
      const Eight eight = call(i);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int number = static_cast<int>(first + j - 8 * i);
        if (number >= 0 && number < 8) value[j] = kept(value[j], eight.number(number));
      }
    }
  }

 private:
  __device__ __forceinline__ Eight call(int64_t i) const {
    PhiloxState own = philox_state;
    own.read();
    forget_round_keys(own.seed);
    return own.eight(i);
  }

  __device__ __forceinline__ C kept(C x, uint32_t number) const { return number >= threshold ? x * scale : C(0); }
};

}  // namespace kf::KF_BACKEND
