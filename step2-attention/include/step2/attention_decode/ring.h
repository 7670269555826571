// A warp's keys in flight: what v4_pipeline begins, and v5 and v6 go on with.
//
// Memory is slow to answer, so it must be asked for much at a time: 4.3 TB/s times a microsecond are 4.3 MB, 33 KB for
// each multiprocessor of an H200. Registers do not hold that. So a lane's vectors wait in shared memory, in a ring of
// stages, each for one step of 16 keys; cp.async brings them. A lane reads back only what it loaded itself, so it
// waits for its own copies and for nobody: no barrier.
#pragma once

#include <step2/attention_decode/fragments.h>
#include <step2/cp_async.h>

namespace kf::KF_BACKEND::attention_decode {

template <int kColumns>
struct Ring {
  static constexpr int kStages = 3;
  static constexpr int kVectors = Tile<kColumns>::kVectors;

  Vector<uint32_t, 4> stage[kStages][kVectors][kWarpSize];

  // Where among the warp's 32 vectors this lane's lies. Of the values, eight lanes of one t load 128 bytes in a row,
  // and a copy writes them at once if they are a row here, too: lane after lane they would be 64 bytes apart, four to a
  // bank. The xor keeps lanes 0 to 7, which read at the same time, in different banks.
  __device__ static int slot(int index) {
    const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
    return index < 2 * Tile<kColumns>::kChunks ? g * 4 + t : t * 8 + (g ^ 2 * t);
  }

  // Issues the loads of the 16 keys from row `row` on, as Lane::each says.
  template <class T>
  __device__ __forceinline__ void issue_loads(int to, const Args& a, const Lane<T>& lane, int64_t row, int begin,
                                              int end) {
    lane.template each<kColumns>(a, row, begin, end, [&](int index, const uint32_t* from, bool wanted) {
      cp_async_16(&stage[to][index][slot(index)], from, wanted ? 16 : 0);  // 0: nothing is read
    });
  }

  // Keys of a page that does not exist: NaN, and so will be the scores.
  __device__ void no_keys(int to) {
    for (int i = 0; i < kVectors; ++i) {
      const uint32_t bits = i < 2 * Tile<kColumns>::kChunks ? 0x7fff7fffu : 0u;
      stage[to][i][slot(i)] = {{bits, bits, bits, bits}};
    }
  }

  __device__ __forceinline__ Tile<kColumns> read(int from) const {
    Tile<kColumns> tile;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) tile.vector[i] = stage[from][i][slot(i)];
    return tile;
  }
};

// A block's shared memory: a ring for each warp, and where this was, once it is empty, the warp's part. Rows of 128
// bytes must begin at multiples of 128, or a copy writes each in two goes.
template <int kColumns>
union alignas(128) WarpMemory {
  Ring<kColumns> ring;
  RowPart<kColumns> part[kRows];
};

// A warp's whole walk through its share of the keys: issue_loads(stage, first) issues those of the 16 keys from `first`
// on.
template <int kColumns, class T, class IssueLoads>
__device__ __forceinline__ void walk(WarpMemory<kColumns>& memory, Attending<kColumns, T>& own, const Args& a,
                                     const Group& group, IssueLoads issue_loads) {
  constexpr int kStages = Ring<kColumns>::kStages, kStep = kWarps * kKeys;
  const float scale_log2 = static_cast<float>(a.scale * kLog2e);
  const int begin = group.first + static_cast<int>(threadIdx.x / kWarpSize) * kKeys;
  int stage = 0;
  for (int then = begin, first = begin - (kStages - 1) * kStep; first < group.last; then += kStep, first += kStep) {
    if (then < group.last) issue_loads(stage, then);
    cp_async_commit();                             // an empty group counts, too
    stage = stage + 1 == kStages ? 0 : stage + 1;  // now the oldest one
    if (first < begin) continue;
    cp_async_wait<kStages - 1>();
    own.take(memory.ring.read(stage), scale_log2, first, group.begin);
  }
  cp_async_wait<0>();
  __syncwarp();  // the other lanes' vectors lie where this lane's part goes
  own.leave(memory.part);
}

}  // namespace kf::KF_BACKEND::attention_decode
