// mlp v1_separate: four launches
//
// Idea      Product, GELU, product, residual: each layer by its op's v1. The baseline.
// Launch    as linear_gelu's v1_separate, then as linear_bias_dropout_residual's v1_separate
// Moves     (5·rows·width + 4·rows·inner + 2·width·inner + width + inner)·sizeof(T) bytes, without a residual
//           3·rows·width fewer; 4·rows·width·inner FLOPs
// Limits    as these; it rounds what lies between
#include <linear/best.h>
#include "layers.h"

namespace kf::KF_BACKEND::mlp {

std::string v1_separate_can_implement(const Args& a) {
  const std::string first = linear_gelu::v1_separate_can_implement(first_layer(a));
  return first.empty() ? linear::can_implement(plain_second_layer(a)) : first;
}

int64_t v1_separate_scratch_bytes(const Args& a) {
  const int64_t second = a.residual == nullptr
                             ? linear::best_scratch_bytes(plain_second_layer(a))
                             : linear_bias_dropout_residual::v1_separate_scratch_bytes(second_layer(a));
  return activation_bytes(a) + std::max(linear_gelu::v1_separate_scratch_bytes(first_layer(a)), second);
}

void v1_separate(const Args& a, void* stream) {
  linear_gelu::v1_separate(first_layer(a), stream);
  a.residual == nullptr ? linear::launch_best(plain_second_layer(a), second_layer(a).scratch, stream)
                        : linear_bias_dropout_residual::v1_separate(second_layer(a), stream);
}

}  // namespace kf::KF_BACKEND::mlp
