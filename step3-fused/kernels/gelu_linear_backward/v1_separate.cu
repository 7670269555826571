// gelu_linear_backward v1_separate: product, slope, product, sums
//
// Idea      The product leads back through the weight; a kernel of its own multiplies by GELU's slope, and computes
//           gelu(x) again on the way, since the weight's gradient needs it. The baseline.
// Launch    those of linear's `auto` for the products; between them grid ⌈rows·⌈depth/8⌉/256⌉, block 256; sums as
//           linear_backward's v1
// Moves     (3·rows·width + 6·rows·depth + 2·depth·width + width)·sizeof(T) bytes at the least, 4·rows·depth of them
//           for slope and gelu(x); 4·rows·depth·width FLOPs
// Limits    as linear's; it rounds grad · weightᵀ and gelu(x)
#include "product.h"

namespace kf::KF_BACKEND::gelu_linear_backward {
namespace {

// grad · weightᵀ, behind gelu(x).
void* returned(const Args& a) { return static_cast<unsigned char*>(a.scratch) + activation_bytes(a); }

kf::linear::Args product_for_x(const Args& a) {
  kf::linear::Args product = linear_backward::product_for_x(layer_of(a));
  product.y = returned(a);
  return product;
}

}  // namespace

std::string v1_separate_can_implement(const Args& a) { return linear_backward::can_implement(layer_of(a)); }

int64_t v1_separate_scratch_bytes(const Args& a) {
  return 2 * activation_bytes(a) + std::max(rest_bytes(a), linear::best_scratch_bytes(product_for_x(a)));
}

void v1_separate(const Args& a, void* stream) {
  void* const rest = static_cast<unsigned char*>(a.scratch) + 2 * activation_bytes(a);
  linear::launch_best(product_for_x(a), rest, stream);
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const Rows<T> product(returned(a), a.rows, a.depth);
    a.tanh ? launch_epilogue(product, epilogue_of<T, true>(a), stream)
           : launch_epilogue(product, epilogue_of<T, false>(a), stream);
  });
  launch_rest(a, a.scratch, rest, stream);
}

}  // namespace kf::KF_BACKEND::gelu_linear_backward
