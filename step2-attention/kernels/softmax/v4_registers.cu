// softmax v4_registers: a row is read once and stays in registers
//
// Idea      A row of GPT-2 is small: 1024 bfloat16 are 2 KB, 16 registers for each lane of a warp. So load it once, all
//           loads in flight together, and find maximum, sum and quotients in registers.
// Since v3  One read instead of two; no running maximum, since all values are there before the first is needed. Up to
//           4 KB a warp takes a row, two or four rows a block: no shared memory and no barrier; wider rows take a
//           block. Rows that begin anywhere are loaded in vectors, too: from the first multiple of 16 bytes in a row to
//           its last. What is left on either side, fewer than 16 bytes, is one value for each of the first threads
//           (row.h).
// Launch    A row has V = ⌊width·sizeof(T)/16⌋ vectors. V ≤ 64: grid ⌈rows/4⌉, block 32×4. V ≤ 256: grid ⌈rows/2⌉,
//           block 32×2. Else grid rows, block 128, 256 or 512, the first with V ≤ 8·block, 32 values of shared memory.
//           A lane of a warp that has a row holds ⌈V/32⌉ vectors, a thread of a block 4 or 8
// Moves     2·rows·width·sizeof(T) bytes; about 5·rows·width FLOPs and rows·width exponentials
// Limits    V ≤ 4096: a row of 64 KB; rows ≤ 2³¹−1. float16 in rows of 8 to 32 KB: 8 bytes of a thread spill
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/vector.h>
#include <step2/online_softmax.h>
#include <step2/reduce.h>

#include <type_traits>

#include "registers.h"
#include "rungs.h"

namespace kf::KF_BACKEND::softmax {
namespace {

// For how many blocks a multiprocessor shall have registers: enough that some load while others compute. A thread has
// then up to 80 of them for 64 values of a half type, or 64 for 32 floats. 512 threads of a half type are alone, with
// up to 128.
template <int kThreads, class T>
constexpr int kBlocksBeside = kThreads == kWarpSize ? 1 : (sizeof(T) == 2 ? 768 : 1024) / kThreads;

// `alike`: y's rows begin as far from a multiple of 16 bytes as x's do, so that vectors can be stored, too.
template <int kThreads, int kVectors, class T>
__global__ void __launch_bounds__(kThreads* RowShape<kThreads, kVectors>::kRows, kBlocksBeside<kThreads, T>)
    v4_registers_kernel(const T* __restrict__ x, T* __restrict__ y, int64_t rows, int width, int64_t q_length,
                        compute_t<T> scale, bool alike) {
  constexpr int N = 16 / sizeof(T);
  using C = compute_t<T>;
  constexpr bool kWarpARow = kThreads == kWarpSize;
  __shared__ C shared[kWarpARow ? 1 : kWarpSize];
  const int64_t row = int64_t{blockIdx.x} * RowShape<kThreads, kVectors>::kRows + threadIdx.y;
  if (row >= rows) return;  // a whole warp; a block that takes a row has one
  x += row * width;
  y += row * width;
  const Cut<T> cut(x, width);
  const int seen = static_cast<int>(columns_seen(row, width, q_length));
  const int seen_end = min(seen, cut.end);
  const int single = cut.single(threadIdx.x);
  const auto first_of = [&](int i) { return cut.begin + (i * kThreads + static_cast<int>(threadIdx.x)) * N; };

  const auto take = [&](auto all_seen) {  // so many vectors of each thread are, and if any, y lies as x does
    constexpr int kSeen = decltype(all_seen)::value;
    int4 bits[kVectors] = {};  // not of Vector<T, N>: 0 or loaded would then be decided value by value
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (kSeen > i || first_of(i) < seen_end) bits[i] = *reinterpret_cast<const int4*>(x + first_of(i));
    }
    C alone = single < seen ? score_of(to_compute(x[single]), scale) : C(-INFINITY);

    C weight[kVectors][N];  // first the scores
    C max = alone;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      scores_of(load_vector<N>(reinterpret_cast<const T*>(&bits[i])), scale, first_of(i),
                kSeen > i ? INT32_MAX : seen_end, weight[i]);
#pragma unroll
      for (int j = 0; j < N; ++j) max = greater_of(max, weight[i][j]);
    }
    max = kWarpARow ? warp_max(max) : block_max(max, shared);

    alone = weight_of(alone, max);
    C sum = alone;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) sum += weight[i][j] = weight_of(weight[i][j], max);  // 0 for what is hidden
    }
    sum = kWarpARow ? warp_sum(sum) : block_sum(sum, shared);

    const C inverse = 1 / sum;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (kSeen <= i && first_of(i) >= cut.end) break;
#pragma unroll
      for (int j = 0; j < N; ++j) weight[i][j] *= inverse;
      // Where the row has no maximum they are not 0 yet.
      hide(weight[i], first_of(i), kSeen > i ? INT32_MAX : seen, C(0));
      if (kSeen > 0 || alike) {
        store_values<true>(y + first_of(i), weight[i]);
      } else {
        store_values<false>(y + first_of(i), weight[i]);
      }
    }
    if (single < width) y[single] = from_compute<T>(single < seen ? alone * inverse : C(0));
  };
  // Most rows see all but one of them: then no comparison stands between these. Registers for that a block of eight
  // vectors a thread does not have.
  constexpr int kAllButOne = kWarpARow || kVectors < 8 ? kVectors - 1 : 0;
  if (kAllButOne > 0 && alike && cut.begin + kAllButOne * kThreads * N <= seen_end) {
    return take(std::integral_constant<int, kAllButOne>{});
  }
  take(std::integral_constant<int, 0>{});
}

}  // namespace

std::string v4_registers_can_implement(const Args& a) { return can_implement_in_registers(a); }

void v4_registers(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    with_shape(vectors_of(a), [&](auto shape) {
      using S = decltype(shape);
      v4_registers_kernel<S::kThreads, S::kVectors>
          <<<static_cast<unsigned>(ceil_div(a.rows, S::kRows)), dim3(S::kThreads, S::kRows), 0, as_stream(stream)>>>(
              static_cast<const T*>(a.x), static_cast<T*>(a.y), a.rows, static_cast<int>(a.width), mask_of(a),
              static_cast<compute_t<T>>(a.scale), alike(a.x, a.y));
    });
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::softmax
