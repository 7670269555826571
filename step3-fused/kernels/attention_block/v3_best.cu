// attention_block v3_best: three launches, each by the rung that suits it
//
// Idea      Attention, the projection with its bias, the addition with LayerNorm: of each the rung that its op's `auto`
//           takes for these sizes. This is what a fusion of all three has to beat.
// Since v1  Step 2's rungs on tensor cores instead of a block that reads keys and values for 16 queries, and this
//           stage's products and row kernels. Bias and addition are no launches of their own: linear adds the one,
//           residual_layer_norm does the other.
// Launch    theirs
// Moves     10·batch·q_length·width·sizeof(T) bytes, width = heads·head_dim: attention 4 (q, k, v, its output), the
//           projection 2, the addition with LayerNorm 4; less what the L2 cache still holds of one launch when the next
//           one asks for it. FLOPs as v1. What the way back wants is 8·batch·q_length bytes more: attention's output
//           and its log-sum-exp are written in any case
// Limits    theirs; rounds attention's weights, its output, its projection and the sum
#include <step3/step2_attention.h>

#include <algorithm>

#include "../linear/best.h"
#include "../residual_layer_norm/rungs.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_block {
namespace {

// Between the launches: the projection, attention's output where nobody else wants it, and what rungs ask for
// themselves.
struct Scratch {
  unsigned char *projected, *attended, *rest;

  explicit Scratch(const Args& a) : projected(static_cast<unsigned char*>(a.scratch)) {
    attended = rest = projected + attended_bytes(a.attention, a.dtype);
    a.attended == nullptr ? rest += attended_bytes(a.attention, a.dtype)
                          : attended = static_cast<unsigned char*>(a.attended);
  }
};

linear::Args projection(const Args& a, const Scratch& scratch) {
  const Attention& t = a.attention;
  const int64_t width = t.heads * t.head_dim;
  return {scratch.attended,
          a.proj_weight,
          a.proj_bias,
          scratch.projected,
          t.batch * t.q_length,
          width,
          width,
          false,
          false,
          false,
          a.dtype};
}

}  // namespace

std::string v3_best_supports(const Args& a) {
  const std::string refused = refused_attention(a.attention, a.dtype);
  return refused.empty() ? linear::refused(projection(a, Scratch(a))) : refused;
}

int64_t v3_best_scratch_bytes(const Args& a) {
  return (a.attended == nullptr ? 2 : 1) * attended_bytes(a.attention, a.dtype) +
         std::max(attention_scratch_bytes(a.attention, a.dtype), linear::best_scratch_bytes(projection(a, Scratch(a))));
}

void v3_best(const Args& a, void* stream) {
  const Attention& t = a.attention;
  const Scratch scratch(a);
  launch_attention(t, a.dtype, scratch.attended, scratch.rest, stream);
  linear::launch_best(projection(a, scratch), scratch.rest, stream);
  const residual_layer_norm::Args rows = normalisation(a, scratch.projected);
  best_rung(residual_layer_norm::rungs(), kf::residual_layer_norm::automatic(rows), rows).launch(rows, stream);
}

}  // namespace kf::KF_BACKEND::attention_block
