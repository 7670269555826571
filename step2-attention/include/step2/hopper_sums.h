// The sums of a product on their way out: rounded, and by stmatrix from registers, as wgmma leaves them, to shared
// memory, where a lane finds eight neighbours, or TMA a box.
#pragma once

#include <step2/hopper_tile.h>
#include <step2/mma.h>

namespace kf::KF_BACKEND::hopper {

// A consumer warp's sums go through shared memory in rounds of some slices, swizzled as TMA does it, and a round in
// parts: half of the warp's rows in one slice, of which each lane has two vectors of eight neighbours.
template <int kSlicesARound>
struct Parts {
  // Where the lane's vector i of a part lies, and which row and column of the warp's tile it is.
  static __device__ __forceinline__ int row_of(int part, int i) {
    return part % 2 * 8 + 4 * i + static_cast<int>(threadIdx.x % kWarpSize) / 8;
  }
  static __device__ __forceinline__ int column_of(int part) { return part / 2 * kSlice + threadIdx.x % 8 * 8; }
  static __device__ __forceinline__ int offset_of(int part, int i) {
    const int row = row_of(part, i), slice = part / 2 % kSlicesARound;
    return slice * kWarpRows * kSlice + row * kSlice + (threadIdx.x % 8 ^ row % 8) * 8;
  }
};

// A consumer's sums of a tile, rounded: two neighbours in each register, as wgmma leaves them.
template <class Tile, class T>
struct Rounded {
  uint32_t pair[Tile::kWidth / 4];

  // bias: of the tile's columns, in shared memory. Lane 4g + t has the columns 2t and 2t + 1 of each eight.
  __device__ __forceinline__ void take(const float (&sum)[Tile::kWidth / 2], const T* bias) {
#pragma unroll
    for (int group = 0; group < Tile::kWidth / 8; ++group) {
      float b[2];
      widen(load_vector<2>(bias + group * 8 + threadIdx.x % 4 * 2), b);
      pair[2 * group] = pack<T>(sum[4 * group] + b[0], sum[4 * group + 1] + b[1]);
      pair[2 * group + 1] = pack<T>(sum[4 * group + 2] + b[0], sum[4 * group + 3] + b[1]);
    }
  }

  // Those of one round, of kSlicesARound slices, into the warp's own staging buffer.
  template <int kSlicesARound>
  __device__ __forceinline__ void put(T* staging, int round) const {
    put<kSlicesARound>(staging, round, [](uint32_t (&)[4], const T*) {});
  }

  // The same, where what is to be added lies in the staging buffer: sums come in its place.
  __device__ __forceinline__ void add(T* staging, int round) const {
    put<1>(staging, round, [](uint32_t (&r)[4], const T* there) {
      Packed<T> sums{{r[0], r[1], r[2], r[3]}}, more;
      ldmatrix(more.word, there);
      sums = sum_of(sums, more);
#pragma unroll
      for (int i = 0; i < 4; ++i) r[i] = sums.word[i];
    });
  }

  // The same as `put`; first change(r, address) of each four registers, which stmatrix takes to `address`, this lane's
  // address.
  template <int kSlicesARound, class F>
  __device__ __forceinline__ void put(T* staging, int round, F change) const {
    put_if<kSlicesARound, 0>(staging, round, change);
  }

 private:
  // `pair` must be indexed by constants, or it would be an array in memory.
  template <int kSlicesARound, int kRound, class F>
  __device__ __forceinline__ void put_if(T* staging, int round, F change) const {
    if constexpr (kRound * kSlicesARound < Tile::kSlices) {
      if (round != kRound) return put_if<kSlicesARound, kRound + 1>(staging, round, change);
      constexpr int kFirst = kRound * kSlicesARound * 8;  // eight columns each
      const int lane = threadIdx.x % kWarpSize, row = lane % 16;
#pragma unroll
      for (int group = 0; group < kSlicesARound * 8; group += 2) {
        const uint32_t* const from = pair + 2 * (kFirst + group);
        uint32_t r[4] = {from[0], from[1], from[2], from[3]};
        const int own = group + lane / 16;
        T* const address = staging + own / 8 * kWarpRows * kSlice + row * kSlice + (own % 8 ^ row % 8) * 8;
        change(r, address);
        stmatrix(address, r);
      }
    }
  }
};

}  // namespace kf::KF_BACKEND::hopper
