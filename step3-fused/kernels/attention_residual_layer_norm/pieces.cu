// attention_residual_layer_norm pieces: attention, addition with LayerNorm, each by its op's `auto`
//
// Idea      Two launches, of each the rung that its op's `auto` takes for these sizes: step 2's on tensor cores instead
//           of v1's block that reads keys and values for 16 queries. The addition is no launch of its own.
// Launch    theirs
// Moves     8·batch·q_length·width·sizeof(T) bytes, width = heads·head_dim: attention 4 (q, k, v, its output), the
//           addition with LayerNorm 4, one of which nobody asked for; less what the L2 cache still holds. FLOPs as v1.
//           What the way back wants is 8·batch·q_length bytes more: attention's output and its log-sum-exp are written
//           in any case
// Limits    theirs; rounds attention's weights, its output and the sum
#include <step3/step2_attention.h>

#include "../residual_layer_norm/rungs.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_residual_layer_norm {

std::string pieces_can_implement(const Args& a) { return can_implement_attention(a.attention, a.dtype); }

int64_t pieces_scratch_bytes(const Args& a) {
  return (a.attended == nullptr ? 2 : 1) * attended_bytes(a.attention, a.dtype) +
         attention_scratch_bytes(a.attention, a.dtype);
}

void pieces(const Args& a, void* stream) {
  const int64_t bytes = attended_bytes(a.attention, a.dtype);
  auto* const sum = static_cast<unsigned char*>(a.scratch);
  void* const attended = a.attended == nullptr ? sum + bytes : a.attended;
  launch_attention(a.attention, a.dtype, attended, sum + (a.attended == nullptr ? 2 : 1) * bytes, stream);
  const residual_layer_norm::Args rows = normalisation(a, attended, sum);
  best_rung(residual_layer_norm::rungs(), kf::residual_layer_norm::automatic(rows), rows).launch(rows, stream);
}

}  // namespace kf::KF_BACKEND::attention_residual_layer_norm
