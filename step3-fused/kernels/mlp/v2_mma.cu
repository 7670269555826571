// mlp v2_mma: two launches
//
// Idea      GELU is the epilogue of the first product, the residual that of the second: the activation is written once
// and
//           read once, and nothing else is.
// Since v1  The ops' v2_mma.
// Launch    twice as linear's v5_mma
// Moves     (3·rows·width + 2·rows·inner + 2·width·inner + width + inner)·sizeof(T) bytes at the least, and rows·inner
//           more if the preactivation is kept; 4·rows·width·inner FLOPs
// Limits    as linear's v5_mma; float16 and bfloat16. Both products and the activation: it rounds what lies between
#include "layers.h"

namespace kf::KF_BACKEND::mlp {

std::string v2_mma_can_implement(const Args& a) {
  const std::string first = linear_gelu::v2_mma_can_implement(first_layer(a));
  if (!first.empty()) return first;
  return a.residual == nullptr ? linear::v5_mma_can_implement(plain_second_layer(a))
                               : linear_bias_dropout_residual::v2_mma_can_implement(second_layer(a));
}

int64_t v2_mma_scratch_bytes(const Args& a) { return activation_bytes(a); }

void v2_mma(const Args& a, void* stream) {
  linear_gelu::v2_mma(first_layer(a), stream);
  a.residual == nullptr ? linear::v5_mma(plain_second_layer(a), stream)
                        : linear_bias_dropout_residual::v2_mma(second_layer(a), stream);
}

}  // namespace kf::KF_BACKEND::mlp
