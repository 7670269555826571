// layer_norm_linear pieces: LayerNorm and the product, each by its op's `auto`
//
// Idea      Two launches, each as well as it can be done alone.
// Launch    those of layer_norm's and linear's `auto`
// Moves     (3·rows·depth + depth·width + rows·width + width + 2·depth)·sizeof(T) bytes; 2·rows·depth·width FLOPs
// Limits    as layer_norm's and linear's; it rounds the normalised rows
#include <linear/best.h>

#include "../layer_norm/rungs.h"
#include "rungs.h"

namespace kf::KF_BACKEND::layer_norm_linear {
namespace {

// The normalised rows lie in front of what the product's rung needs.
int64_t normalised_bytes(const Args& a) { return padded_bytes(a.rows * a.depth * size_of(a.dtype)); }

}  // namespace

std::string pieces_can_implement(const Args& a) { return linear::can_implement(linear::args_of(a, nullptr, a.y)); }

int64_t pieces_scratch_bytes(const Args& a) {
  return normalised_bytes(a) + linear::best_scratch_bytes(linear::args_of(a, nullptr, a.y));
}

void pieces(const Args& a, void* stream) {
  const kf::layer_norm::Args rows{a.x,     a.norm_weight, a.norm_bias, a.scratch, a.rows,
                                  a.depth, a.eps,         a.dtype,     a.mean,    a.rstd};
  best_rung(layer_norm::rungs(), kf::layer_norm::automatic(rows), rows).launch(rows, stream);
  linear::launch_best(linear::args_of(a, a.scratch, a.y), static_cast<unsigned char*>(a.scratch) + normalised_bytes(a),
                      stream);
}

}  // namespace kf::KF_BACKEND::layer_norm_linear
