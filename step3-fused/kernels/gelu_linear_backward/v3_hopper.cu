// gelu_linear_backward v3_hopper: the slope under the next tile's product
//
// Idea      As linear_gelu's v3: what follows a tile is done under the next one's product. Its reads and writes, twice
//           as many, are hidden there; its instructions are not.
// Since v1  linear's v7 with GeluSlopeEpilogue; x comes by TMA, a round of 64 columns ahead.
// Launch    as linear's v7_persistent with tiles of 192, 128 or 64 columns and a ring of 4, 5 or 7 stages, whichever
//           leaves the fewest multiprocessors idle; the other product and the sums as v1
// Moves     (3·rows·width + 4·rows·depth + 2·depth·width + width)·sizeof(T) bytes at the least, 2·rows·depth of them
//           for x and gelu(x); 4·rows·depth·width FLOPs
// Limits    as linear's v7_persistent; x at a multiple of 16 bytes, a depth that is a multiple of 8. So that the sums
//           of a tile can wait in half the registers, it rounds grad · weightᵀ and gelu(x)
#include <step2/hopper_product.h>

#include "product.h"

namespace kf::KF_BACKEND::gelu_linear_backward {

std::string v3_hopper_can_implement(const Args& a) {
  const std::string why_not = hopper::can_implement_product(product_of(a), Major::kK, major_of_weight(a), a.dtype);
  const std::string of_x = hopper::can_implement_read(a.x, a.depth);
  if (!why_not.empty() || !of_x.empty()) return why_not.empty() ? of_x : why_not;
  return linear_backward::can_implement(layer_of(a));
}

int64_t v3_hopper_scratch_bytes(const Args& a) { return activation_bytes(a) + rest_bytes(a); }

void v3_hopper(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    with_epilogue<T>(a, [&](auto weight, const auto& epilogue) {
      hopper::with_tile<hopper::EpilogueCost::kHeavy, Major::kK, weight.value>(product_of(a), [&](auto tile) {
        hopper::launch_product<decltype(tile), T>(product_of(a), epilogue, stream);
      });
    });
  });
  launch_rest(a, a.scratch, static_cast<unsigned char*>(a.scratch) + activation_bytes(a), stream);
}

}  // namespace kf::KF_BACKEND::gelu_linear_backward
