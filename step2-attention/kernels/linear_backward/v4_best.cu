// linear_backward v4_best: each product by the rung that suits it
//
// Idea      Which rung is ahead depends on the sizes, and each product has its own. linear's `auto` was read off
//           measurements: take what it takes, cuBLASLt included.
// Since v3  linear's `auto`.
// Launch    those of linear's `auto`; the sums as v1
// Moves     as v1
// Limits    as linear's; it rounds sums of parts, at some sizes
#include "gradients.h"
#include "rungs.h"

namespace kf::KF_BACKEND::linear_backward {

std::string v4_best_can_implement(const Args& a) { return can_implement(layer_of(a, a.grad)); }

int64_t v4_best_scratch_bytes(const Args& a) {
  const Layer layer = layer_of(a, a.grad);
  return sums_bytes(layer) + best_scratch_bytes(layer);
}

void v4_best(const Args& a, void* stream) {
  const Layer layer = layer_of(a, a.grad);
  launch_best(layer, static_cast<unsigned char*>(a.scratch) + sums_bytes(layer), stream);
  launch_sums(layer, a.grad_bias, a.scratch, stream);
}

}  // namespace kf::KF_BACKEND::linear_backward
