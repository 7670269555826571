// linear_gelu v3_hopper: GELU under the next tile's product
//
// Idea      At a depth of 768 a tile's product takes twelve steps, and v2's GELU, two special functions for each
//           output, would take a third of that again. linear's persistent rungs do what follows a tile under the next
//           one's product, when the tensor cores are at work: waiting is hidden so, instructions are not, and so
//           they must be few.
// Since v2  linear's v7 and v8 with GeluEpilogue. GPT-2's GELU takes one special function, tanh.approx:
//           its gate is right to 1/4096.
// Launch    as linear's v8_cluster with tiles of 256 columns, or v7_persistent with tiles of 128 or 64 and a ring of 5
//           or 7 stages, whichever leaves the fewest multiprocessors idle
// Roles     those of linear's v8, or v7; a consumer's warps have the epilogue, too
// Barriers  those of linear's v8, or v7; the epilogue has none: a warp waits for its own stores
// A round   64 columns of a warp's sums (128 where tiles have an even number of 64 and no preactivation is kept): the
//           last store has been read ─ stmatrix ─ GELU in place, eight neighbours a lane ─ TMA stores it
// Moves     (rows·depth + depth·width + rows·width + width)·sizeof(T) bytes at the least, and rows·width·sizeof(T) more
//           if the preactivation is kept; 2·rows·depth·width FLOPs
// Limits    as linear's v8_cluster. So that the sums of a tile can wait in half the registers, it rounds the product
#include <step2/hopper_product.h>

#include "product.h"

namespace kf::KF_BACKEND::linear_gelu {

std::string v3_hopper_can_implement(const Args& a) {
  return hopper::can_implement_product(product_of(a), Major::kK, major_of_weight(a), a.dtype);
}

void v3_hopper(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    with_epilogue<T, true>(a, [&](auto weight, const auto& epilogue) {
      hopper::with_tile<hopper::EpilogueCost::kLight, Major::kK, weight.value>(product_of(a), [&](auto tile) {
        hopper::launch_product<decltype(tile), T>(product_of(a), epilogue, stream);
      });
    });
  });
}

}  // namespace kf::KF_BACKEND::linear_gelu
