// linear_gelu_backward v1_separate: slope, sums, products
//
// Idea      grad times GELU's slope by a kernel of its own, the sums of its columns by step 1's two stages, then the
//           two products of linear_backward. The baseline.
// Launch    grid ⌈rows·⌈width/8⌉/256⌉, block 256; sums as linear_backward's v1; products as linear's `auto`
// Moves     (6·rows·width + 2·rows·depth + 2·depth·width + width)·sizeof(T) bytes at the least, 4·rows·width of them
//           for slope and sums; 4·rows·depth·width FLOPs
// Limits    as linear's. For the products and for the sums it rounds grad · gelu'(preactivation)
#include <step1/column_sum.h>
#include <step3/epilogues.h>

#include <linear_backward/gradients.h>
#include "rungs.h"

namespace kf::KF_BACKEND::linear_gelu_backward {
namespace {

using linear_backward::Changed, linear_backward::changed_in, linear_backward::changed_scratch_bytes;
using linear_backward::layer_of;

template <class T, bool kTanh>
struct Multiply : Epilogue<T, true, false> {
  Multiply(const Rows<T>& out, const Rows<T>& preactivation) : Epilogue<T, true, false>{out, preactivation, {}} {}

  __device__ __forceinline__ void operator()(int64_t, int64_t, Packed<T>& value, Packed<T>& other) const {
    compute_t<T> grad[8], preactivation[8];
    widen(value, grad);
    widen(other, preactivation);
#pragma unroll
    for (int j = 0; j < 8; ++j) grad[j] *= gelu_slope<kTanh>(preactivation[j]);
    value = packed<T>(grad);
  }
};

}  // namespace

std::string v1_separate_can_implement(const Args& a) { return linear_backward::can_implement(layer_of(a, a.grad)); }

int64_t v1_separate_scratch_bytes(const Args& a) { return changed_scratch_bytes(layer_of(a, a.grad)); }

void v1_separate(const Args& a, void* stream) {
  const Changed changed = changed_in(a.scratch, layer_of(a, a.grad));
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const Rows<T> grad(a.grad, a.rows, a.width), h(a.preactivation, a.rows, a.width),
        out(changed.grad, a.rows, a.width);
    a.tanh ? launch_epilogue(grad, Multiply<T, true>(out, h), stream)
           : launch_epilogue(grad, Multiply<T, false>(out, h), stream);
    sum_rows<T>(static_cast<const T*>(changed.grad), changed.sums, a.grad_bias, a.rows, a.width, stream);
  });
  linear_backward::launch_best(layer_of(a, changed.grad), changed.rest, stream);
}

}  // namespace kf::KF_BACKEND::linear_gelu_backward
