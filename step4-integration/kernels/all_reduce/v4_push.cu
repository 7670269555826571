// all_reduce v4_push: rows are written to the other workers, and a word that has come says so itself
//
// Idea      A piece that others read takes three ways over NVLink, one after the other: the flag, the request, the
//           answer; and before the flag a fence, which waits until the piece is in memory. Here each worker writes its
//           rows straight into the others' buffers, and there is no flag: the slots hold a number that no x is, a NaN
//           of all ones, and a thread asks its own words until none of them is that. One way, no fence. Words of 32
//           bits arrive whole, in any order. A slot must hold that NaN again when it is used next, so there are three:
//           one that is being written to, one that the fastest worker may be at already, and the last one, which each
//           worker clears for itself: nobody writes to it before this worker's next row has come.
// Since v3  Words that are their own flags, and stores instead of loads over NVLink.
// Launch    as v3_fused
// Moves     (1 + 3·workers)·rows·width·sizeof(T) bytes: x, the residual, two outputs; for each other worker a row is
//           written, read and cleared. (workers−1)·rows·width·sizeof(T) of them by NVLink
// Limits    up to 8 workers, width ≤ 4096, not float64
#include <step2/dependent_launch.h>

#include "row_end.h"
#include "rungs.h"

namespace kf::KF_BACKEND::all_reduce {
namespace {

// N elements as words: four, or one that half of is empty. Both are read and written past the L1 cache.
template <class T, int N>
union Words {
  static constexpr int kCount = N * sizeof(T) < 4 ? 1 : N * sizeof(T) / 4;
  uint32_t word[kCount];
  Vector<T, N> vector;
};

// In `to`'s buffer, what `from` writes to this block's slot of that turn.
__device__ __forceinline__ uint32_t* slot_of(const Args& a, int to, int from, uint32_t turn) {
  char* const slots = static_cast<char*>(a.peers[to]) + sizeof(Header) + kMostBlocks * 2 * kPieceBytes;
  const int64_t place = (int64_t{blockIdx.x} * kSlots + turn % kSlots) * a.workers + from;
  return reinterpret_cast<uint32_t*>(slots + place * a.slot_bytes);
}

template <int kItems, int N, class T>
__global__ void __launch_bounds__(kMostThreads, 1) v4_push_kernel(const Args a) {
  launch_dependent_grids();
  wait_on_dependent_grids();  // x is there
  using Piece = Words<T, N>;
  constexpr int kWords = Piece::kCount;
  __shared__ compute_t<T> shared[kWarpSize];
  const int width = static_cast<int>(a.width);
  const uint32_t nothing[4] = {kNothing, kNothing, kNothing, kNothing};
  const auto words = static_cast<uint32_t>(width / N * kWords);
  uint32_t turn = header_of(a, a.rank)->pushed[blockIdx.x], last = header_of(a, a.rank)->words[blockIdx.x];
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    turn = (turn + 1) % kSlots;  // a number that only grew would break off one day, between two slots
    Piece own[kItems];
    for_each_vector<kItems, N>(width, [&](int i, int column) {
      own[i].word[0] = 0;
      own[i].vector = load_vector<N>(static_cast<const T*>(a.x) + row * a.width + column);
    });
    for_each_vector<kItems, N>(width, [&](int i, int column) {
      uint32_t sent[kWords];
#pragma unroll
      for (int w = 0; w < kWords; ++w) sent[w] = own[i].word[w] == kNothing ? 0x7fff7fffu : own[i].word[w];
      for (int away = 1; away < a.workers; ++away) {
        const int to = (a.rank + away) % a.workers;
        store_words(slot_of(a, to, a.rank, turn) + column / N * kWords, sent);
      }
    });
    RowEnd<kItems, N, T> end(a, row);
    for (int other = 0; other < a.workers; ++other) {  // what has come in the turn before, in which rows may be wider
      uint32_t* const old = slot_of(a, a.rank, other, turn + kSlots - 1);
      for (uint32_t w = 4 * threadIdx.x; w < last && other != a.rank; w += 4 * blockDim.x)
        store_words(old + w, nothing);
    }
    last = words;

    compute_t<T> value[kItems][N] = {};
    for_each_vector<kItems, N>(width, [&](int i, int column) {
      const auto load = [&](int first, Vector<T, N>(&piece)[kTogether]) {
        Piece got[kTogether];
        int missing = 0;
        const auto all_here = [&] {
          missing = -1;
#pragma unroll
          for (int k = 0; k < kTogether; ++k) {
            got[k] = own[i];
            if (first + k >= a.workers || first + k == a.rank) continue;
            load_words(slot_of(a, a.rank, first + k, turn) + column / N * kWords, got[k].word);
          }
#pragma unroll
          for (int k = 0; k < kTogether; ++k) {
            bool here = first + k >= a.workers || first + k == a.rank;
            if (!here) here = none_is_nothing(got[k].word);
            if (!here) missing = first + k;
          }
          return missing < 0;
        };
        wait_for(a, all_here, [&] { return missing; });
#pragma unroll
        for (int k = 0; k < kTogether; ++k) piece[k] = got[k].vector;
      };
      sum_over_workers<N, T>(a, load, value[i]);
    });
    end.finish(value, shared);
    // The next row tells others that the slots are clear, so that must be seen first. The end of a kernel sees to it.
    if (row + gridDim.x < a.rows) __threadfence_system();
  }
  if (threadIdx.x == 0) {
    header_of(a, a.rank)->pushed[blockIdx.x] = turn;
    header_of(a, a.rank)->words[blockIdx.x] = last;
  }
}

}  // namespace

void v4_push(const Args& a, void* stream) {
  with_row(a, [&](auto type, auto items, auto n, unsigned threads) {
    const auto kernel = v4_push_kernel<decltype(items)::value, decltype(n)::value, typename decltype(type)::element>;
    launch_dependent(kernel, blocks_of(a.rows), threads, 0, stream, a);
  });
}

}  // namespace kf::KF_BACKEND::all_reduce
