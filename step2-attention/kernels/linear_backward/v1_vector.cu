// linear_backward v1_vector: two products on CUDA cores, and sums
//
// Idea      The gradient of x is grad times the weight transposed, that of the weight x transposed times grad: two
//           products of the forward pass's size. linear's v4 takes operands whichever way they lie, so nothing is
//           turned. The bias's is a sum over rows, step 1's.
// Launch    twice as linear's v4_vector; then grid (⌈width/32⌉, parts), block 32×8, and grid ⌈width/32⌉, block 32×32:
//           see column_grid_by_one in step 1's include/step1/column_grid.h
// Moves     (3·rows·width + 2·rows·depth + 2·depth·width + width)·sizeof(T) bytes at the least: both products and the
//           sums read grad; 4·rows·depth·width FLOPs
// Limits    as linear's v4_vector, for both products
#include "gradients.h"
#include "rungs.h"

namespace kf::KF_BACKEND::linear_backward {

std::string v1_vector_can_implement(const Args& a) {
  const Layer layer = layer_of(a, a.grad);
  const std::string for_x = linear::v4_vector_can_implement(product_for_x(layer));
  return for_x.empty() ? linear::v4_vector_can_implement(product_for_weight(layer)) : for_x;
}

int64_t v1_vector_scratch_bytes(const Args& a) { return sums_bytes(layer_of(a, a.grad)); }

void v1_vector(const Args& a, void* stream) {
  const Layer layer = layer_of(a, a.grad);
  linear::v4_vector(product_for_x(layer), stream);
  linear::v4_vector(product_for_weight(layer), stream);
  launch_sums(layer, a.grad_bias, a.scratch, stream);
}

}  // namespace kf::KF_BACKEND::linear_backward
