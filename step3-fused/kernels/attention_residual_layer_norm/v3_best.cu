// attention_residual_layer_norm v3_best: two launches, each by the rung that suits it
//
// Idea      Attention, then the addition with LayerNorm: of each the rung that its op's `auto` takes for these sizes.
// Since v1  Step 2's rungs on tensor cores instead of a block that reads keys and values for 16 queries. The addition
//           is no launch of its own
// Launch    theirs
// Moves     8·batch·q_length·width·sizeof(T) bytes, width = heads·head_dim: attention 4 (q, k, v, its output), the
//           addition with LayerNorm 4, one of which nobody asked for; less what the L2 cache still holds. FLOPs as v1
// Limits    theirs; rounds attention's weights, its output and the sum
#include <step3/step2_attention.h>

#include "../residual_layer_norm/rungs.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_residual_layer_norm {
std::string v3_best_supports(const Args& a) { return refused_attention(a.attention, a.dtype); }

int64_t v3_best_scratch_bytes(const Args& a) {
  return 2 * attended_bytes(a.attention, a.dtype) + attention_scratch_bytes(a.attention, a.dtype);
}

void v3_best(const Args& a, void* stream) {
  const Attention& t = a.attention;
  auto* const attended = static_cast<unsigned char*>(a.scratch);
  auto* const sum = attended + attended_bytes(t, a.dtype);
  launch_attention(t, a.dtype, attended, sum + attended_bytes(t, a.dtype), stream);
  const residual_layer_norm::Args rows{
      attended, a.residual, a.weight, a.bias, a.y, sum, t.batch * t.q_length, t.heads * t.head_dim, a.eps, a.dtype};
  best_rung(residual_layer_norm::rungs(), kf::residual_layer_norm::automatic(rows), rows).launch(rows, stream);
}

}  // namespace kf::KF_BACKEND::attention_residual_layer_norm
