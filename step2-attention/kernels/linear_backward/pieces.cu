// linear_backward pieces: each product by linear's `auto`
//
// Idea      Which rung is ahead depends on the sizes, and each product has its own. linear's `auto` was read off
//           measurements: take what it takes, cuBLASLt included.
// Launch    those of linear's `auto`; the sums as v1
// Moves     as v1
// Limits    as linear's; it rounds sums of parts, at some sizes
#include "gradients.h"
#include "rungs.h"

namespace kf::KF_BACKEND::linear_backward {

std::string pieces_can_implement(const Args& a) { return can_implement(layer_of(a, a.grad)); }

int64_t pieces_scratch_bytes(const Args& a) {
  const Layer layer = layer_of(a, a.grad);
  return sums_bytes(layer) + best_scratch_bytes(layer);
}

void pieces(const Args& a, void* stream) {
  const Layer layer = layer_of(a, a.grad);
  launch_best(layer, static_cast<unsigned char*>(a.scratch) + sums_bytes(layer), stream);
  launch_sums(layer, a.grad_bias, a.scratch, stream);
}

}  // namespace kf::KF_BACKEND::linear_backward
