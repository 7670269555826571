// mlp pieces: each layer by its op's `auto`
//
// Idea      The first layer's epilogue computes, the second's reads: which rung is ahead differs, and with few rows
//           both are a matter of the weights' bytes. Take what `auto` of linear_gelu and of
//           linear_bias_dropout_residual takes, without a residual that of linear.
// Launch    as these
// Moves     (3·rows·width + 2·rows·inner + 2·width·inner + width + inner)·sizeof(T) bytes, a residual included; with
//           the preactivation rows·inner·sizeof(T) more; 4·rows·width·inner FLOPs
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

std::string pieces_can_implement(const Args& a) {
  const std::string first = can_implement_any(linear_gelu::rungs(), first_layer(a));
  return first.empty() ? linear::can_implement(plain_second_layer(a)) : first;
}

int64_t pieces_scratch_bytes(const Args& a) {
  const int64_t first = scratch_bytes_of(first_rung(a), first_layer(a));
  const int64_t second = a.residual == nullptr ? linear::best_scratch_bytes(plain_second_layer(a))
                                               : scratch_bytes_of(second_rung(a), second_layer(a));
  return activation_bytes(a) + std::max(first, second);
}

void pieces(const Args& a, void* stream) {
  first_rung(a).launch(first_layer(a), stream);
  a.residual == nullptr ? linear::launch_best(plain_second_layer(a), second_layer(a).scratch, stream)
                        : second_rung(a).launch(second_layer(a), stream);
}

}  // namespace kf::KF_BACKEND::mlp
