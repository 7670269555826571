// attention_block pieces: attention, projection, addition with LayerNorm, each by its op's `auto`
//
// Idea      Three launches, of each the rung that its op's `auto` takes for these sizes. This is what a fusion of all
//           three has to beat. Bias and addition are no launches of their own: linear adds the one,
//           residual_layer_norm does the other. Where rows are many the product adds the residual itself, and
//           layer_norm is last: the bare projection is never written to memory and read back.
// Launch    theirs
// Moves     10·batch·q_length·width·sizeof(T) bytes, width = heads·head_dim: attention 4 (q, k, v, its output), the
//           projection 2, the addition with LayerNorm 4; or, the residual in the product, 9: 4, 3 and 2. Less what the
//           L2 cache still holds of one launch when the next one asks for it. FLOPs as v1. What the way back wants is
//           8·batch·q_length bytes more: attention's output and its log-sum-exp are written in any case
// Limits    theirs; rounds attention's weights, its output, its projection and the sum
#include <step3/step2_attention.h>

#include <algorithm>

#include <linear/best.h>
#include "../layer_norm/rungs.h"
#include "../linear_bias_dropout_residual/rungs.h"
#include "../residual_layer_norm/rungs.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_block {
namespace {

// Whether the product adds the residual: for what follows attention, on an H100, 106 µs instead of 132 with 32768 rows
// of 768, 34.2 instead of 37.7 with 8192, level with 4096, slower with fewer. With dropout, and in float32, nobody has
// measured it.
bool product_adds(const Args& a) {
  constexpr int64_t kManyRows = 8192;
  return a.threshold == 0 && size_of(a.dtype) == 2 && a.attention.batch * a.attention.q_length >= kManyRows;
}

// Between the launches: attention's output where nobody else wants it, the projection where it is not added at once,
// and what rungs ask for themselves.
struct Scratch {
  unsigned char *attended, *projected = nullptr, *rest;

  explicit Scratch(const Args& a) : attended(static_cast<unsigned char*>(a.attended)) {
    rest = static_cast<unsigned char*>(a.scratch);
    if (attended == nullptr) attended = take(a);
    if (!product_adds(a)) projected = take(a);
  }

  static int64_t bytes(const Args& a) {
    return ((a.attended == nullptr) + !product_adds(a)) * attended_bytes(a.attention, a.dtype);
  }

 private:
  unsigned char* take(const Args& a) {
    unsigned char* const taken = rest;
    rest += attended_bytes(a.attention, a.dtype);
    return taken;
  }
};

linear::Args projection(const Args& a, const Scratch& scratch) {
  const Attention& t = a.attention;
  linear::Args product{};
  product.x = scratch.attended, product.weight = a.proj_weight, product.bias = a.proj_bias;
  product.y = scratch.projected;
  product.rows = t.batch * t.q_length, product.depth = product.width = t.heads * t.head_dim;
  product.dtype = a.dtype;
  return product;
}

linear_bias_dropout_residual::Args product_with_residual(const Args& a, const Scratch& scratch) {
  const linear::Args p = projection(a, scratch);
  linear_bias_dropout_residual::Args product{};  // its threshold of 0 drops nothing
  product.x = p.x, product.weight = p.weight, product.bias = p.bias;
  product.residual = a.residual, product.y = a.sum;
  product.rows = p.rows, product.depth = p.depth, product.width = p.width;
  product.dtype = p.dtype, product.scratch = scratch.rest;
  return product;
}

const Rung<linear_bias_dropout_residual::Args>& best(const linear_bias_dropout_residual::Args& args) {
  return best_rung(linear_bias_dropout_residual::rungs(), kf::linear_bias_dropout_residual::automatic(args), args);
}

int64_t product_scratch_bytes(const Args& a, const Scratch& scratch) {
  if (!product_adds(a)) return linear::best_scratch_bytes(projection(a, scratch));
  const linear_bias_dropout_residual::Args product = product_with_residual(a, scratch);
  return scratch_bytes_of(best(product), product);
}

}  // namespace

std::string pieces_can_implement(const Args& a) {
  const std::string why_not = can_implement_attention(a.attention, a.dtype);
  return why_not.empty() ? linear::can_implement(projection(a, Scratch(a))) : why_not;
}

int64_t pieces_scratch_bytes(const Args& a) {
  return Scratch::bytes(a) +
         std::max(attention_scratch_bytes(a.attention, a.dtype), product_scratch_bytes(a, Scratch(a)));
}

void pieces(const Args& a, void* stream) {
  const Attention& t = a.attention;
  const Scratch scratch(a);
  launch_attention(t, a.dtype, scratch.attended, scratch.rest, stream);
  if (product_adds(a)) {
    const linear_bias_dropout_residual::Args product = product_with_residual(a, scratch);
    best(product).launch(product, stream);
    layer_norm::Args rows{};
    rows.x = a.sum, rows.weight = a.weight, rows.bias = a.bias, rows.y = a.y;
    rows.rows = product.rows, rows.width = product.width, rows.eps = a.eps, rows.dtype = a.dtype;
    rows.mean = a.mean, rows.rstd = a.rstd;
    best_rung(layer_norm::rungs(), kf::layer_norm::automatic(rows), rows).launch(rows, stream);
    return;
  }
  linear::launch_best(projection(a, scratch), scratch.rest, stream);
  const residual_layer_norm::Args rows = normalisation(a, scratch.projected);
  best_rung(residual_layer_norm::rungs(), kf::residual_layer_norm::automatic(rows), rows).launch(rows, stream);
}

}  // namespace kf::KF_BACKEND::attention_block
