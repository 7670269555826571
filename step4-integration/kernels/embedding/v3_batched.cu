// embedding v3_batched: four sequences' tokens at one position
//
// Idea      A position's row is the same for the whole batch. So a thread loads its 16 bytes of that row once, and
//           those of the token's row of four sequences: four loads in flight that do not wait for each other, where v2
//           has one. The sums are stored as what nobody reads soon, so that the tables stay in L2.
// Since v2  A block has the shape of rows: x runs over columns, y over positions. So no thread divides, where v2 spends
//           two 64-bit divisions, dozens of instructions, on each 16 bytes; only blocks are counted off, in 32 bits.
//           Where `positions` moves each sequence for itself, the position table has four rows to load as well.
// Bad ids   As in v1: a row of NaN.
// Launch    grid (b·⌈length/y⌉, ⌈batch/4⌉), block (x, y), no shared memory; N = 16/sizeof(T), or 1, as in v2;
//           b = ⌈width/N/256⌉ blocks a row, x = ⌈width/N/b⌉, y = ⌊256/x⌋
// Moves     (2·batch + 1)·length·width·sizeof(T) + batch·length·sizeof(id) bytes (the positions' rows come from cache
//           after the first four sequences); batch·length·width FLOPs
// Limits    batch ≤ 4·65535, b·⌈length/y⌉ ≤ 2³¹−1
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/vector.h>

#include <string>

#include "place.h"
#include "rungs.h"

namespace kf::KF_BACKEND::embedding {
namespace {

constexpr int kThreads = 256;
constexpr int kSequences = 4;

template <int N, bool kMoved, class T, class Id>
__global__ void __launch_bounds__(kThreads)
    v3_batched_kernel(const Args a, const Id* __restrict__ ids, const T* __restrict__ token,
                      const T* __restrict__ position_weight, T* __restrict__ y, unsigned blocks_a_row) {
  constexpr int kRows = kMoved ? kSequences : 1;
  const int64_t s = int64_t{blockIdx.x / blocks_a_row} * blockDim.y + threadIdx.y;
  const int64_t column = (int64_t{blockIdx.x % blocks_a_row} * blockDim.x + threadIdx.x) * N;
  if (s >= a.length || column >= a.width) return;
  const int64_t first = int64_t{blockIdx.y} * kSequences;
  Vector<T, N> p[kRows]{}, v[kSequences]{};
  bool valid[kSequences];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    valid[r] = false;
    if (first + r < a.batch) {
      const int64_t place = place_of(a, first + r, s);
      valid[r] = place < a.position_rows;
      if (valid[r]) p[r] = load_vector<N>(position_weight + place * a.width + column);
    }
  }
#pragma unroll
  for (int r = 0; r < kSequences; ++r) {
    const int64_t id = first + r < a.batch ? int64_t{ids[(first + r) * a.length + s]} : -1;
    valid[r] = valid[kMoved ? r : 0] && id >= 0 && id < a.vocab;
    if (valid[r]) v[r] = load_vector<N>(token + id * a.width + column);
  }
#pragma unroll
  for (int r = 0; r < kSequences; ++r) {
    compute_t<T> sum[N], of_position[N];
    widen(v[r], sum);
    widen(p[kMoved ? r : 0], of_position);
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] = valid[r] ? sum[j] + of_position[j] : compute_t<T>(NAN);
    if (first + r < a.batch) {
      store_vector_streaming<N>(y + ((first + r) * a.length + s) * a.width + column, narrow<T>(sum));
    }
  }
}

template <int N, bool kMoved, class T, class Id>
void launch(const Args& a, void* stream) {
  const int64_t pieces = ceil_div(a.width, N);
  const int64_t blocks_a_row = ceil_div(pieces, kThreads);
  const int64_t x = ceil_div(pieces, blocks_a_row);
  const int64_t y = kThreads / x;
  const dim3 grid(static_cast<unsigned>(ceil_div(a.length, y) * blocks_a_row),
                  static_cast<unsigned>(ceil_div(a.batch, kSequences)));
  const dim3 block(static_cast<unsigned>(x), static_cast<unsigned>(y));
  v3_batched_kernel<N, kMoved><<<grid, block, 0, as_stream(stream)>>>(
      a, static_cast<const Id*>(a.ids), static_cast<const T*>(a.token), static_cast<const T*>(a.position_weight),
      static_cast<T*>(a.y), static_cast<unsigned>(blocks_a_row));
}

template <int N, class T, class Id>
void launch_for(const Args& a, void* stream) {
  a.positions == nullptr ? launch<N, false, T, Id>(a, stream) : launch<N, true, T, Id>(a, stream);
}

template <class Id>
void launch_for(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    constexpr int kVector = 16 / sizeof(T);
    a.width % kVector == 0 && aligned_16(a.token, a.position_weight, a.y) ? launch_for<kVector, T, Id>(a, stream)
                                                                          : launch_for<1, T, Id>(a, stream);
  });
}

}  // namespace

std::string v3_batched_can_implement(const Args& a) {
  return a.batch <= int64_t{kSequences} * 65535 ? "" : "takes at most 262140 sequences, got " + std::to_string(a.batch);
}

void v3_batched(const Args& a, void* stream) {
  a.ids_64 ? launch_for<int64_t>(a, stream) : launch_for<int32_t>(a, stream);
  check_launch();
}

}  // namespace kf::KF_BACKEND::embedding
