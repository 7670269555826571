// Memory of other workers: how it is read and written, and how a block waits for theirs.
#pragma once

#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/vector.h>

#include "rungs.h"
#include "words.h"

namespace kf::KF_BACKEND::all_reduce {

using kf::all_reduce::Header, kf::all_reduce::kMostBlocks, kf::all_reduce::kMostThreads, kf::all_reduce::kPieceBytes;

// PTX: ld.acquire, st.release
__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_release_system(uint32_t* address, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ Header* header_of(const Args& a, int worker) {
  return static_cast<Header*>(a.peers[worker]);
}

template <class Ready, class Late>
__device__ __forceinline__ void wait_for(const Args& a, Ready ready, Late late) {
  wait_for(Waiting{"all_reduce", a.rank, a.patience_ns, &header_of(a, a.rank)->told}, ready, late);
}

// Where the piece of a worker's block of this number lies that it wrote in this turn.
template <class T>
__device__ __forceinline__ T* piece_of(const Args& a, int worker, uint32_t turn) {
  char* const pieces = static_cast<char*>(a.peers[worker]) + sizeof(Header);
  return reinterpret_cast<T*>(pieces + (int64_t{blockIdx.x} * 2 + turn % 2) * kPieceBytes);
}

// The block says to all others of its number that its piece is there, and waits for theirs. Two pieces are enough: who
// arrives has read those of the turn before, so in the turn after they may be written again.
__device__ __forceinline__ void meet(const Args& a, uint32_t turn) {
  const int other = static_cast<int>(threadIdx.x);
  __syncthreads();
  if (other < a.workers) {
    store_release_system(&header_of(a, other)->arrived[blockIdx.x][a.rank], turn);
    const uint32_t* const arrived = &header_of(a, a.rank)->arrived[blockIdx.x][other];
    wait_for(a, [&] { return static_cast<int32_t>(load_acquire_system(arrived) - turn) >= 0; }, [&] { return other; });
  }
  __syncthreads();
}

// The sum of the workers' pieces, in the order of the workers: the same bits everywhere. load(first, pieces) gives
// those of `first` and the next ones, as far as there are workers: so many are in flight at a time.
constexpr int kTogether = 4;
template <int N, class T, class Load>
__device__ __forceinline__ void sum_over_workers(const Args& a, Load load, compute_t<T> (&sum)[N]) {
#pragma unroll 1
  for (int first = 0; first < a.workers; first += kTogether) {
    Vector<T, N> piece[kTogether];
    load(first, piece);
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (first + k >= a.workers) break;
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += to_compute(piece[k].element[j]);
    }
  }
}

// The same of what the workers' blocks of this number have laid open.
template <int N, class T>
__device__ __forceinline__ void sum_pieces(const Args& a, uint32_t turn, int at, compute_t<T> (&sum)[N]) {
  const auto load = [&](int first, Vector<T, N>(&piece)[kTogether]) {
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (first + k < a.workers) piece[k] = load_vector<N>(piece_of<T>(a, first + k, turn) + at);
    }
  };
  sum_over_workers<N, T>(a, load, sum);
}

}  // namespace kf::KF_BACKEND::all_reduce
