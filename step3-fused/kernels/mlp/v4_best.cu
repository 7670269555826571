// mlp v4_best: each layer by the rung that suits it
//
// Idea      The first layer's epilogue computes, the second's reads: which rung is ahead differs, and with few rows
// both are
//           a matter of the weights' bytes. Take what the ops' `auto` takes, cuBLASLt's epilogue included.
// Since v3  `auto` of linear_gelu and of linear_bias_dropout_residual, without a residual of linear.
// Launch    as these
// Moves     as v2
// Limits    as these; it rounds what lies between
#include <linear/best.h>
#include "layers.h"

namespace kf::KF_BACKEND::mlp {
namespace {

const Rung<linear_gelu::Args>& first_rung(const Args& a) {
  return best_rung(linear_gelu::rungs(), kf::linear_gelu::automatic(first_layer(a)), first_layer(a));
}

const Rung<linear_bias_dropout_residual::Args>& second_rung(const Args& a) {
  const auto layer = second_layer(a);
  return best_rung(linear_bias_dropout_residual::rungs(), kf::linear_bias_dropout_residual::automatic(layer), layer);
}

}  // namespace

std::string v4_best_can_implement(const Args& a) { return v1_separate_can_implement(a); }

int64_t v4_best_scratch_bytes(const Args& a) {
  const int64_t first = scratch_bytes_of(first_rung(a), first_layer(a));
  const int64_t second = a.residual == nullptr ? linear::best_scratch_bytes(plain_second_layer(a))
                                               : scratch_bytes_of(second_rung(a), second_layer(a));
  return activation_bytes(a) + std::max(first, second);
}

void v4_best(const Args& a, void* stream) {
  first_rung(a).launch(first_layer(a), stream);
  a.residual == nullptr ? linear::launch_best(plain_second_layer(a), second_layer(a).scratch, stream)
                        : second_rung(a).launch(second_layer(a), stream);
}

}  // namespace kf::KF_BACKEND::mlp
