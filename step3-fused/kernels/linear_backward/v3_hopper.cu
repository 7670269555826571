// linear_backward v3_hopper: wgmma, and the depth of the second product shared out
//
// Idea      wgmma takes an operand from shared memory either way round as well. The product for the weight goes over
//           all rows, and its tiles are few: so several blocks share a tile's depth.
// Since v2  linear's v7_persistent for x, v9_split for the weight.
// Launch    as these; the sums as v1
// Moves     as v1, and the parts of the weight's gradient in float32, written and read once
// Limits    as these, for both products
#include "gradients.h"
#include "rungs.h"

namespace kf::KF_BACKEND::linear_backward {

std::string v3_hopper_supports(const Args& a) {
  const Layer layer = layer_of(a, a.grad);
  const std::string for_x = linear::v7_persistent_supports(product_for_x(layer));
  return for_x.empty() ? linear::v9_split_supports(product_for_weight(layer)) : for_x;
}

int64_t v3_hopper_scratch_bytes(const Args& a) {
  const Layer layer = layer_of(a, a.grad);
  return sums_bytes(layer) + linear::v9_split_scratch_bytes(product_for_weight(layer));
}

void v3_hopper(const Args& a, void* stream) {
  const Layer layer = layer_of(a, a.grad);
  linear::v7_persistent(product_for_x(layer), stream);
  kf::linear::Args for_weight = product_for_weight(layer);
  for_weight.scratch = static_cast<unsigned char*>(a.scratch) + sums_bytes(layer);
  linear::v9_split(for_weight, stream);
  launch_sums(layer, a.grad_bias, a.scratch, stream);
}

}  // namespace kf::KF_BACKEND::linear_backward
