// linear_bias_dropout_residual_backward v1_separate: mask, sums, products
//
// Idea      The mask is drawn again and applied to grad by a kernel of its own, the sums of its columns come from step
//           1's two stages, then the two products of linear_backward. The baseline.
// Launch    grid ⌈rows·⌈width/8⌉/256⌉, block 256; sums as linear_backward's v1; products as linear's `auto`
// Moves     (5·rows·width + 2·rows·depth + 2·depth·width + width)·sizeof(T) bytes at the least, 3·rows·width of them
//           for mask and sums; 4·rows·depth·width FLOPs
// Limits    as linear's. For the products and for the sums it rounds the masked gradient
#include <step1/column_sum.h>
#include <step3/epilogues.h>

#include <linear_backward/gradients.h>
#include "rungs.h"

namespace kf::KF_BACKEND::linear_bias_dropout_residual_backward {
using linear_backward::Changed, linear_backward::changed_in, linear_backward::changed_scratch_bytes;
using linear_backward::layer_of;
namespace {

template <class T>
struct Mask : Epilogue<T, false, false> {
  using C = compute_t<T>;
  ElementwiseDropout<C> dropout;

  Mask(const Rows<T>& out, const ElementwiseDropout<C>& dropout)
      : Epilogue<T, false, false>{out, {}, {}}, dropout(dropout) {}
  __device__ __forceinline__ void operator()(int64_t row, int64_t column, Packed<T>& value, Packed<T>&) const {
    C x[8];
    widen(value, x);
    dropout.apply(row * this->out.width + column, x);
    value = packed<T>(x);
  }
};

}  // namespace

std::string v1_separate_can_implement(const Args& a) { return linear_backward::can_implement(layer_of(a, a.grad)); }

int64_t v1_separate_scratch_bytes(const Args& a) { return changed_scratch_bytes(layer_of(a, a.grad)); }

void v1_separate(const Args& a, void* stream) {
  const Changed changed = changed_in(a.scratch, layer_of(a, a.grad));
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    using C = compute_t<T>;
    const ElementwiseDropout<C> dropout{{a.rng_state, a.seed, a.offset}, a.threshold, keep_scale<C>(a.threshold)};
    const Mask<T> drop(Rows<T>(changed.grad, a.rows, a.width), dropout);
    launch_epilogue(Rows<T>(a.grad, a.rows, a.width), drop, stream);
    sum_rows<T>(static_cast<const T*>(changed.grad), changed.sums, a.grad_bias, a.rows, a.width, stream);
  });
  linear_backward::launch_best(layer_of(a, changed.grad), changed.rest, stream);
}

}  // namespace kf::KF_BACKEND::linear_bias_dropout_residual_backward
