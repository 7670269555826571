// gelu_linear_backward v2_mma: the slope on the way out of the product
//
// Idea      The sums of grad · weightᵀ are in registers when x is read, multiplied by the slope and written; gelu(x),
//           which is nearly the same computation, leaves beside it.
// Since v1  linear's v5_mma with GeluSlopeEpilogue at its end.
// Launch    as linear's v5_mma; the other product and the sums as v1
// Moves     (3·rows·width + 4·rows·depth + 2·depth·width + width)·sizeof(T) bytes at the least, 2·rows·depth of them
//           for x and gelu(x); 4·rows·depth·width FLOPs
// Limits    as linear's v5_mma; float16 and bfloat16; it rounds grad · weightᵀ and gelu(x)
#include <step2/mma_product.h>

#include "product.h"

namespace kf::KF_BACKEND::gelu_linear_backward {

std::string v2_mma_can_implement(const Args& a) {
  if (size_of(a.dtype) != 2) return "takes float16 or bfloat16";
  const std::string why_not = mma::can_implement_product(product_of(a), Major::kK, major_of_weight(a), a.dtype);
  return why_not.empty() ? linear_backward::can_implement(layer_of(a)) : why_not;
}

int64_t v2_mma_scratch_bytes(const Args& a) { return activation_bytes(a) + rest_bytes(a); }

void v2_mma(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    with_epilogue<T>(a, [&](auto weight, const auto& epilogue) {
      mma::launch_product<Major::kK, weight.value, T>(product_of(a), epilogue, stream);
    });
  });
  launch_rest(a, a.scratch, static_cast<unsigned char*>(a.scratch) + activation_bytes(a), stream);
}

}  // namespace kf::KF_BACKEND::gelu_linear_backward
