// linear_backward v2_mma: both products on tensor cores
//
// Idea      mma.sync takes its operands from ldmatrix, which transposes on the way where they lie the other way round.
//           So x transposed costs nothing here either.
// Since v1  linear's v5_mma in place of v4_vector.
// Launch    twice as linear's v5_mma; the sums as v1
// Moves     as v1
// Limits    as linear's v5_mma, for both products. That for the weight has few tiles and a great depth: with GPT-2's
//           768 × 768, 36 blocks work
#include "gradients.h"
#include "rungs.h"

namespace kf::KF_BACKEND::linear_backward {

std::string v2_mma_can_implement(const Args& a) {
  const Layer layer = layer_of(a, a.grad);
  const std::string for_x = linear::v5_mma_can_implement(product_for_x(layer));
  return for_x.empty() ? linear::v5_mma_can_implement(product_for_weight(layer)) : for_x;
}

int64_t v2_mma_scratch_bytes(const Args& a) { return sums_bytes(layer_of(a, a.grad)); }

void v2_mma(const Args& a, void* stream) {
  const Layer layer = layer_of(a, a.grad);
  linear::v5_mma(product_for_x(layer), stream);
  linear::v5_mma(product_for_weight(layer), stream);
  launch_sums(layer, a.grad_bias, a.scratch, stream);
}

}  // namespace kf::KF_BACKEND::linear_backward
