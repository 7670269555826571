// mlp v3_hopper: two launches, each with its epilogue under the next tile's product
//
// Idea      As v2, with Hopper's products: the residual's arrival and the stores are hidden under the next tile's.
// Since v2  The ops' v3_hopper; without a residual linear's v7_persistent for the second product.
// Launch    as linear_gelu's v3_hopper, then as linear_bias_dropout_residual's v3_hopper
// Moves     as v2
// Limits    as linear's v8_cluster; the residual at a multiple of 16 bytes. Both products and the activation: it rounds
//           what lies between
#include "layers.h"

namespace kf::KF_BACKEND::mlp {

std::string v3_hopper_can_implement(const Args& a) {
  const std::string first = linear_gelu::v3_hopper_can_implement(first_layer(a));
  if (!first.empty()) return first;
  return a.residual == nullptr ? linear::v7_persistent_can_implement(plain_second_layer(a))
                               : linear_bias_dropout_residual::v3_hopper_can_implement(second_layer(a));
}

int64_t v3_hopper_scratch_bytes(const Args& a) { return activation_bytes(a); }

void v3_hopper(const Args& a, void* stream) {
  linear_gelu::v3_hopper(first_layer(a), stream);
  a.residual == nullptr ? linear::v7_persistent(plain_second_layer(a), stream)
                        : linear_bias_dropout_residual::v3_hopper(second_layer(a), stream);
}

}  // namespace kf::KF_BACKEND::mlp
