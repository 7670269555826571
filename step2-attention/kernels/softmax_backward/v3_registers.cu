// softmax_backward v3_registers: grad and y are read once and stay in registers
//
// Idea      The gradients need grad and y again, when the sum is known. So keep both, as they came: 16 bytes are four
//           registers, while as floats eight values of a half type would be eight. They are widened twice instead.
// Since v2  One read instead of two, in vectors of 16 bytes, all loads of a row in flight together. Up to 4 KB a warp
//           takes a row, two or four rows a block: no shared memory and no barrier; wider rows take a block. Rows begin
//           anywhere: y is cut into vectors as in softmax's v4 (row.h), and grad and the result at the same columns.
//           Where one of them does not begin as far from a multiple of 16 bytes as y does, it goes value by value.
// Launch    A row has V = ⌊width·sizeof(T)/16⌋ vectors. V ≤ 64: grid ⌈rows/4⌉, block 32×4. V ≤ 256: grid ⌈rows/2⌉,
//           block 32×2. Else grid rows, block 128, 256 or 512, the first with V ≤ 8·block, 32 values of shared memory.
//           A lane of a warp that has a row holds ⌈V/32⌉ vectors of each, a thread of a block 4 or 8
// Moves     3·rows·width·sizeof(T) bytes; 5·rows·width FLOPs
// Limits    V ≤ 4096: a row of 64 KB; rows ≤ 2³¹−1
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/vector.h>
#include <step2/reduce.h>

#include <type_traits>

#include "../softmax/registers.h"
#include "row.h"
#include "rungs.h"

namespace kf::KF_BACKEND::softmax_backward {
namespace {

using softmax::can_implement_in_registers;
using softmax::RowShape;
using softmax::with_shape;

// A thread's 16 vectors are 64 registers. With 128 for each a multiprocessor has room for 512 threads: several rows,
// of which some are loaded while others are computed.
constexpr int kThreadsBeside = 512;

// Half types are widened a second time. The compiler sees that this gives the same floats, and would keep them from
// the first time on: 128 registers, not 64. It cannot know that blockIdx.z is 0.
template <class T>
__device__ __forceinline__ void as_if_new(int4& bits) {
  if constexpr (sizeof(T) > 2) return;
  const int zero = static_cast<int>(blockIdx.z);
  bits = make_int4(bits.x ^ zero, bits.y ^ zero, bits.z ^ zero, bits.w ^ zero);
}

// `grad_alike`, `out_alike`: rows of grad or of grad_x begin as far from a multiple of 16 bytes as those of y do.
template <int kThreads, int kVectors, class T>
__global__ void __launch_bounds__(kThreads* RowShape<kThreads, kVectors>::kRows,
                                  kThreadsBeside / (kThreads * RowShape<kThreads, kVectors>::kRows))
    v3_registers_kernel(const T* __restrict__ grad, const T* __restrict__ y, T* __restrict__ grad_x, int64_t rows,
                        int width, int64_t q_length, compute_t<T> scale, bool grad_alike, bool out_alike) {
  constexpr int N = 16 / sizeof(T);
  using C = compute_t<T>;
  constexpr bool kWarpARow = kThreads == kWarpSize;
  __shared__ C shared[kWarpARow ? 1 : kWarpSize];
  const int64_t row = int64_t{blockIdx.x} * RowShape<kThreads, kVectors>::kRows + threadIdx.y;
  if (row >= rows) return;  // a whole warp; a block that takes a row has one
  grad += row * width;
  y += row * width;
  grad_x += row * width;
  const Cut<T> cut(y, width);
  const int seen = static_cast<int>(columns_seen(row, width, q_length));
  const int seen_end = min(seen, cut.end);
  const int single = cut.single(threadIdx.x);
  const auto first_of = [&](int i) { return cut.begin + (i * kThreads + static_cast<int>(threadIdx.x)) * N; };

  const auto take = [&](auto all_seen) {  // so many vectors of each thread are, and if any, all rows lie as y's do
    constexpr int kSeen = decltype(all_seen)::value;
    int4 grad_bits[kVectors] = {}, y_bits[kVectors] = {};
    const auto load = [&](auto alike) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (kSeen <= i && first_of(i) >= seen_end) continue;
        y_bits[i] = bits_from<true>(y + first_of(i));
        grad_bits[i] = bits_from<decltype(alike)::value>(grad + first_of(i));
      }
    };
    // Decided once, so that all loads are in flight.
    kSeen > 0 || grad_alike ? load(std::true_type()) : load(std::false_type());
    const C grad_alone = single < seen ? to_compute(grad[single]) : C(0);
    const C y_alone = single < seen ? to_compute(y[single]) : C(0);

    const auto values = [](const int4& bits) { return reinterpret_cast<const T*>(&bits); };
    C sum = y_alone * grad_alone;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      sum += dot_of(values(grad_bits[i]), values(y_bits[i]), first_of(i), kSeen > i ? INT32_MAX : seen_end);
    }
    sum = kWarpARow ? warp_sum(sum) : block_sum(sum, shared);

#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (kSeen <= i && first_of(i) >= cut.end) break;
      as_if_new<T>(grad_bits[i]);
      as_if_new<T>(y_bits[i]);
      C value[N];
      gradients_of(values(grad_bits[i]), values(y_bits[i]), sum, scale, first_of(i), kSeen > i ? INT32_MAX : seen,
                   value);
      if (kSeen > 0 || out_alike) {
        store_values<true>(grad_x + first_of(i), value);
      } else {
        store_values<false>(grad_x + first_of(i), value);
      }
    }
    if (single < width) grad_x[single] = from_compute<T>(single < seen ? scale * (y_alone * (grad_alone - sum)) : C(0));
  };
  constexpr int kAllButOne = kVectors - 1;  // most rows see these: then no comparison stands between them
  if (kAllButOne > 0 && grad_alike && out_alike && cut.begin + kAllButOne * kThreads * N <= seen_end) {
    return take(std::integral_constant<int, kAllButOne>{});
  }
  take(std::integral_constant<int, 0>{});
}

}  // namespace

std::string v3_registers_can_implement(const Args& a) { return can_implement_in_registers(a); }

void v3_registers(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    with_shape(vectors_of(a), [&](auto shape) {
      using S = decltype(shape);
      v3_registers_kernel<S::kThreads, S::kVectors>
          <<<static_cast<unsigned>(ceil_div(a.rows, S::kRows)), dim3(S::kThreads, S::kRows), 0, as_stream(stream)>>>(
              static_cast<const T*>(a.grad), static_cast<const T*>(a.y), static_cast<T*>(a.grad_x), a.rows,
              static_cast<int>(a.width), mask_of(a), static_cast<compute_t<T>>(a.scale), alike(a.grad, a.y),
              alike(a.grad_x, a.y));
    });
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::softmax_backward
