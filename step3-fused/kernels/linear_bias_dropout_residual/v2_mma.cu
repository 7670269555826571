// linear_bias_dropout_residual v2_mma: dropout and residual on the way out of the product
//
// Idea      The residual is read where it is added, and the sum is written once: the product never exists in memory.
//           The random numbers need no memory either, as in step 1: eight neighbours share one call of Philox.
// Since v1  linear's v5_mma with DropoutResidualEpilogue at its end.
// Launch    as linear's v5_mma
// Moves     (rows·depth + depth·width + 2·rows·width + width)·sizeof(T) bytes at the least; 2·rows·depth·width FLOPs
// Limits    as linear's v5_mma; float16 and bfloat16; it rounds the product
#include <step2/mma_product.h>

#include "product.h"

namespace kf::KF_BACKEND::linear_bias_dropout_residual {

std::string v2_mma_can_implement(const Args& a) {
  if (size_of(a.dtype) != 2) return "takes float16 or bfloat16";
  return mma::can_implement_product(product_of(a), Major::kK, major_of_weight(a), a.dtype);
}

void v2_mma(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    with_major_of_weight(a.weight_transposed, [&](auto weight) {
      mma::launch_product<Major::kK, weight.value, T>(product_of(a), epilogue_of<T>(a), stream);
    });
  });
}

}  // namespace kf::KF_BACKEND::linear_bias_dropout_residual
