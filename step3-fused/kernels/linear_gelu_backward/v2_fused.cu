// linear_gelu_backward v2_fused: slope and sums in one pass
//
// Idea      As step 1's bias_gelu_backward: the kernel that multiplies by the slope walks down the rows and adds up
//           what it writes. The bias's gradient costs no further trip.
// Since     step 1's v2_fused: include/step3/summed_gradient.h, which other ops share, and the products.
// Launch    grid (⌈width/256⌉, parts), block 32×8, 8.3 KB shared memory; grid ⌈width/32⌉, block 32×32, 4 KB: see
//           column_grid_by_eight in step 1's include/step1/column_grid.h; products as linear's `auto`
// Moves     (5·rows·width + 2·rows·depth + 2·depth·width + width)·sizeof(T) bytes at the least, 3·rows·width of them
//           for slope and sums; 4·rows·depth·width FLOPs
// Limits    as linear's. For the products, not for the sums, it rounds grad · gelu'(preactivation)
#include <step1/gelu.h>
#include <step3/summed_gradient.h>

#include <linear_backward/gradients.h>
#include "rungs.h"

namespace kf::KF_BACKEND::linear_gelu_backward {
namespace {

using linear_backward::Changed, linear_backward::changed_in, linear_backward::changed_scratch_bytes;
using linear_backward::layer_of;

template <class T, bool kTanh>
struct Slope {
  static constexpr int kBlocks = 1, kWaves = 1;
  const T* preactivation;

  __device__ void begin() {}
  template <bool kAligned, class Whole>
  __device__ __forceinline__ void apply(Whole whole, int64_t i, int first, int last, compute_t<T> (&value)[8]) const {
    compute_t<T> h[8];
    load_some<kAligned>(whole, preactivation + i, first, last, h);
#pragma unroll
    for (int j = 0; j < 8; ++j) value[j] *= fast_gelu_slope<T, kTanh>(h[j]);
  }
};

}  // namespace

std::string v2_fused_can_implement(const Args& a) { return linear_backward::can_implement(layer_of(a, a.grad)); }

int64_t v2_fused_scratch_bytes(const Args& a) { return changed_scratch_bytes(layer_of(a, a.grad)); }

void v2_fused(const Args& a, void* stream) {
  const Changed changed = changed_in(a.scratch, layer_of(a, a.grad));
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const auto h = static_cast<const T*>(a.preactivation);
    const auto launch = [&](const auto& change) {
      launch_summed_gradient<T>(a.grad, changed.grad, a.grad_bias, changed.sums, a.rows, a.width,
                                aligned_16(a.grad, a.preactivation), change, stream);
    };
    a.tanh ? launch(Slope<T, true>{h}) : launch(Slope<T, false>{h});
  });
  linear_backward::launch_best(layer_of(a, changed.grad), changed.rest, stream);
}

}  // namespace kf::KF_BACKEND::linear_gelu_backward
