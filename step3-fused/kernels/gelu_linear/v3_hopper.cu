// gelu_linear v3_hopper: GELU in one warpgroup while the other multiplies
//
// Idea      wgmma takes its first factor from registers, too. A consumer brings 64 × 64 of x there, computes GELU, and
//           issues the product; meanwhile the tensor cores work for the other consumer. A consumer has all columns of
//           its tile, so with 256 of them GELU is computed a quarter as often as in v2: still width/256 times.
// Since v2  linear's v7 and v8 with ChangingConsumer (include/step3/hopper_product.h).
// Launch    as linear's v8_cluster with tiles of 256 columns, or v7_persistent with tiles of 128 or 64, whichever
//           leaves the fewest multiprocessors idle
// Moves     (rows·depth + depth·width + rows·width + width)·sizeof(T) bytes at the least; 2·rows·depth·width FLOPs and
//           rows·depth·width/256 GELUs, the narrower the tiles the more
// Limits    as linear's v8_cluster; it rounds gelu(x)
#include <step3/hopper_product.h>

#include "product.h"

namespace kf::KF_BACKEND::gelu_linear {

std::string v3_hopper_can_implement(const Args& a) {
  return hopper::can_implement_product(product_of(a), Major::kK, major_of_weight(a), a.dtype);
}

void v3_hopper(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    with_prologue<T>(a, [&](auto weight, const auto& prologue) {
      hopper::with_tile<hopper::EpilogueCost::kLight, Major::kK, weight.value>(product_of(a), [&](auto tile) {
        const Store<T> store{{a.y, a.rows, a.width}};
        hopper::launch_product<decltype(tile), T>(product_of(a), prologue, store, stream);
      });
    });
  });
}

}  // namespace kf::KF_BACKEND::gelu_linear
