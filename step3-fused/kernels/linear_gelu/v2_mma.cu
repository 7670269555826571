// linear_gelu v2_mma: GELU on the way out of the product
//
// Idea      When a tile's sums are ready they are in registers, and GELU is a few instructions for each. So nothing is
//           read back, and the one thing that is written is what the next product wants.
// Since v1  linear's v5_mma with another epilogue, GeluEpilogue in include/step3/epilogues.h.
// Launch    as linear's v5_mma
// Moves     (rows·depth + depth·width + rows·width + width)·sizeof(T) bytes at the least, and rows·width·sizeof(T) more
//           if the preactivation is kept; 2·rows·depth·width FLOPs
// Limits    as linear's v5_mma; float16 and bfloat16; it rounds the product
#include <step2/mma_product.h>

#include "product.h"

namespace kf::KF_BACKEND::linear_gelu {

std::string v2_mma_can_implement(const Args& a) {
  if (size_of(a.dtype) != 2) return "takes float16 or bfloat16";
  return mma::can_implement_product(product_of(a), Major::kK, major_of_weight(a), a.dtype);
}

void v2_mma(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    with_epilogue<T, false>(a, [&](auto weight, const auto& epilogue) {
      mma::launch_product<Major::kK, weight.value, T>(product_of(a), epilogue, stream);
    });
  });
}

}  // namespace kf::KF_BACKEND::linear_gelu
