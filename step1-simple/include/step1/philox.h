// Random numbers without a state: the same (seed, offset, index) gives the same number, in any thread of any launch.
//
// Philox4x32-10: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011,
// https://doi.org/10.1145/2063384.2063405. Seed, offset and subsequence go where cuRAND and PyTorch put them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kf::KF_BACKEND {

// Ten rounds turn a counter and a key into 128 random bits; a round is two 32 x 32 -> 64-bit products and a few xors.
__device__ __forceinline__ uint4 philox(uint64_t seed, uint64_t offset, uint64_t subsequence) {
  uint4 c = make_uint4(static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32),
                       static_cast<uint32_t>(subsequence), static_cast<uint32_t>(subsequence >> 32));
  uint32_t key_x = static_cast<uint32_t>(seed), key_y = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t x = uint64_t{0xD2511F53} * c.x;
    const uint64_t z = uint64_t{0xCD9E8D57} * c.z;
    c = make_uint4(static_cast<uint32_t>(z >> 32) ^ c.y ^ key_x, static_cast<uint32_t>(z),
                   static_cast<uint32_t>(x >> 32) ^ c.w ^ key_y, static_cast<uint32_t>(x));
    key_x += 0x9E3779B9;
    key_y += 0xBB67AE85;
  }
  return c;
}

// For a kernel that calls philox in a loop: hides from the compiler that the seed stays the same. It would compute the
// twenty round keys once, before the loop, and keep a register for each: fewer warps would fit.
__device__ __forceinline__ void forget_round_keys(uint64_t& seed) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+l"(seed));
#else
  static_cast<void>(seed);
#endif
}

// Eight random numbers of 16 bits from one call: in this step for the elements 8*block ... 8*block + 7 of a tensor.
struct Eight {
  uint4 bits;

  __device__ __forceinline__ uint32_t number(int j) const {
    const uint32_t word = j < 4 ? (j < 2 ? bits.x : bits.y) : (j < 6 ? bits.z : bits.w);
    return j % 2 == 0 ? word & 0xFFFF : word >> 16;
  }
};

// Where dropout's random numbers start. Under a CUDA graph the two numbers lie in the GPU's memory, because a replay
// must see new ones; otherwise they come with the launch, and nobody waits for a read.
struct PhiloxState {
  const int64_t* in_memory;  // {seed, offset}, or null
  uint64_t seed;
  uint64_t offset;

  __device__ __forceinline__ void read() {
    if (in_memory == nullptr) return;
    seed = static_cast<uint64_t>(in_memory[0]);
    offset = static_cast<uint64_t>(in_memory[1]);
  }

  // PyTorch counts offsets in 32-bit numbers, and a call makes four.
  __device__ __forceinline__ Eight eight(int64_t block) const {
    return {philox(seed, offset / 4, static_cast<uint64_t>(block))};
  }
};

// What kept elements are multiplied by, so that the expected sum stays: one over the part that is kept. The part is
// counted in 65536ths, as the mask is, and not taken from the caller's p.
template <class C>
constexpr C keep_scale(uint32_t threshold) {
  return threshold < 65536 ? C(65536) / C(65536 - threshold) : C(0);
}

}  // namespace kf::KF_BACKEND
