// layer_norm_linear v3_hopper: one warpgroup normalises while the other multiplies
//
// Idea      As gelu_linear's v3: a consumer's 64 × 64 of x go through registers, are normalised there, and wgmma takes
//           them: once for each 192 columns, a third as often as in v2.
// Since v2  linear's v7 with ChangingConsumer (include/step3/hopper_product.h).
// Launch    as layer_norm's v3_registers; then as linear's v7_persistent with tiles of 192, 128 or 64 columns,
//           whichever leaves the fewest multiprocessors idle
// Moves     (2·rows·depth + depth·width + rows·width + width + 2·depth)·sizeof(T) bytes at the least;
//           2·rows·depth·width FLOPs, and 5·rows·depth·width/192 for LayerNorm, the narrower the tiles the more
// Limits    as linear's v7_persistent, and depth ≤ 16384; it rounds the normalised rows
#include <step3/hopper_product.h>

#include "product.h"

namespace kf::KF_BACKEND::layer_norm_linear {

std::string v3_hopper_can_implement(const Args& a) {
  const std::string why_not = hopper::can_implement_product(product_of(a), Major::kK, major_of_weight(a), a.dtype);
  return why_not.empty() ? can_implement_prologue(a) : why_not;
}

int64_t v3_hopper_scratch_bytes(const Args& a) { return statistics_bytes(a); }

void v3_hopper(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    launch_statistics<T>(a, static_cast<float*>(a.scratch), stream);
    with_major_of_weight(a.weight_transposed, [&](auto weight) {
      hopper::with_tile<hopper::EpilogueCost::kHeavy, Major::kK, weight.value>(product_of(a), [&](auto tile) {
        const Store<T> store{{a.y, a.rows, a.width}};
        hopper::launch_product<decltype(tile), T>(product_of(a), prologue_of<T>(a), store, stream);
      });
    });
  });
}

}  // namespace kf::KF_BACKEND::layer_norm_linear
