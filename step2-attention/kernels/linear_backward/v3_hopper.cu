// linear_backward v3_hopper: wgmma, and tiles by how many there are
//
// Idea      wgmma takes an operand from shared memory either way round as well. The product for the weight goes over
//           all rows and may have few tiles: then they are smaller, and two warpgroups share the depth of each.
// Since v2  linear's v7_persistent for x. For the weight v9_split where not half of the multiprocessors would have a
//           tile of 128 × 256, else v7_persistent.
// Launch    as these; the sums as v1
// Moves     as v1
// Limits    as these, for both products
#include <kf/launch.h>

#include "gradients.h"
#include "rungs.h"

namespace kf::KF_BACKEND::linear_backward {

std::string v3_hopper_can_implement(const Args& a) {  // v9_split takes what v7_persistent takes
  const Layer layer = layer_of(a, a.grad);
  const std::string for_x = linear::v7_persistent_can_implement(product_for_x(layer));
  return for_x.empty() ? linear::v7_persistent_can_implement(product_for_weight(layer)) : for_x;
}

int64_t v3_hopper_scratch_bytes(const Args& a) { return sums_bytes(layer_of(a, a.grad)); }

void v3_hopper(const Args& a, void* stream) {
  const Layer layer = layer_of(a, a.grad);
  linear::v7_persistent(product_for_x(layer), stream);
  const kf::linear::Args for_weight = product_for_weight(layer);
  const bool few = ceil_div(for_weight.rows, 128) * ceil_div(for_weight.width, 256) < multiprocessors() / 2;
  (few ? linear::v9_split : linear::v7_persistent)(for_weight, stream);
  launch_sums(layer, a.grad_bias, a.scratch, stream);
}

}  // namespace kf::KF_BACKEND::linear_backward
