// linear_bias_dropout_residual_backward v2_fused: mask and sums in one pass
//
// Idea      As step 1's bias_dropout_residual_backward: the kernel that applies the mask adds up what it writes. A
//           thread's eight elements begin at a multiple of eight, whatever the width: they are one Philox call.
// Since     step 1's v2_fused: include/step3/summed_gradient.h, which other ops share, and the products. In half types
//           registers for five blocks on a multiprocessor, and four waves of blocks, as step 1 has it.
// Launch    grid (⌈width/256⌉, parts), block 32×8, 8.3 KB shared memory; grid ⌈width/32⌉, block 32×32, 4 KB: see
//           column_grid_by_eight in step 1's include/step1/column_grid.h; products as linear's `auto`
// Moves     (4·rows·width + 2·rows·depth + 2·depth·width + width)·sizeof(T) bytes at the least, 2·rows·width of them
//           for mask and sums; 4·rows·depth·width FLOPs
// Limits    as linear's. For the products, not for the sums, it rounds the masked gradient
#include <step1/philox.h>
#include <step3/summed_gradient.h>

#include <linear_backward/gradients.h>
#include "rungs.h"

namespace kf::KF_BACKEND::linear_bias_dropout_residual_backward {
namespace {

using linear_backward::Changed, linear_backward::changed_in, linear_backward::changed_scratch_bytes;
using linear_backward::layer_of;

template <class T>
struct Mask {
  using C = compute_t<T>;
  static constexpr int kBlocks = kDropoutBlocks<T>, kWaves = kDropoutWaves;
  PhiloxState philox_state;
  uint32_t threshold;
  C scale;

  __device__ void begin() { philox_state.read(); }
  template <bool kAligned, class Whole>
  __device__ __forceinline__ void apply(Whole, int64_t i, int, int, C (&value)[8]) {
    if constexpr (sizeof(T) == 2) forget_round_keys(philox_state.seed);
    const Eight eight = philox_state.eight(i / 8);
#pragma unroll
    for (int j = 0; j < 8; ++j) value[j] = eight.number(j) >= threshold ? scale * value[j] : C(0);
  }
};

}  // namespace

std::string v2_fused_can_implement(const Args& a) { return linear_backward::can_implement(layer_of(a, a.grad)); }

int64_t v2_fused_scratch_bytes(const Args& a) { return changed_scratch_bytes(layer_of(a, a.grad)); }

void v2_fused(const Args& a, void* stream) {
  const Changed changed = changed_in(a.scratch, layer_of(a, a.grad));
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const Mask<T> mask{{a.rng_state, a.seed, a.offset}, a.threshold, keep_scale<compute_t<T>>(a.threshold)};
    launch_summed_gradient<T>(a.grad, changed.grad, a.grad_bias, changed.sums, a.rows, a.width, aligned_16(a.grad),
                              mask, stream);
  });
  linear_backward::launch_best(layer_of(a, changed.grad), changed.rest, stream);
}

}  // namespace kf::KF_BACKEND::linear_bias_dropout_residual_backward
