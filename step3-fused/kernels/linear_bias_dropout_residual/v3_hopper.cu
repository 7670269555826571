// linear_bias_dropout_residual v3_hopper: dropout and residual under the next tile's product
//
// Idea      The residual comes from memory, and ten rounds of Philox are some hundred instructions for eight outputs.
//           Under the next tile's product the wait for the residual is hidden; the instructions are not, they take the
//           tensor cores' time.
// Since v1  linear's v7 with DropoutResidualEpilogue (linear_gelu's v2 has the plain form). The residual
//           comes by TMA, issued a round of 64 columns ahead: a load into registers would have to arrive before the
//           next product may be issued.
// Launch    as linear's v7_persistent with tiles of 192, 128 or 64 columns and a ring of 4, 5 or 7 stages, whichever
//           leaves the fewest multiprocessors idle
// Moves     (rows·depth + depth·width + 2·rows·width + width)·sizeof(T) bytes at the least; 2·rows·depth·width FLOPs
// Limits    as linear's v7_persistent; a width that is a multiple of 8, the residual at a multiple of 16 bytes. So that
//           the sums of a tile can wait in half the registers, it rounds the product
#include <step2/hopper_product.h>

#include "product.h"

namespace kf::KF_BACKEND::linear_bias_dropout_residual {

std::string v3_hopper_can_implement(const Args& a) {
  const std::string why_not = hopper::can_implement_product(product_of(a), Major::kK, major_of_weight(a), a.dtype);
  return why_not.empty() ? hopper::can_implement_read(a.residual, a.width) : why_not;
}

void v3_hopper(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    with_major_of_weight(a.weight_transposed, [&](auto weight) {
      hopper::with_tile<hopper::EpilogueCost::kHeavy, Major::kK, weight.value>(product_of(a), [&](auto tile) {
        hopper::launch_product<decltype(tile), T>(product_of(a), epilogue_of<T>(a), stream);
      });
    });
  });
}

}  // namespace kf::KF_BACKEND::linear_bias_dropout_residual
