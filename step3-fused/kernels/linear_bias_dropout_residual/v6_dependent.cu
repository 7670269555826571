// linear_bias_dropout_residual v6_dependent: few rows, launched before the kernel in front has ended
//
// Idea      linear's v13_dependent with dropout and residual at its end. A thread asks for its part of the residual
//           before the product.
// Since v5  linear's v13 in place of v7
// Launch    as linear's v13_dependent
// Moves     (rows·depth + depth·width + 2·rows·width + width)·sizeof(T) bytes at the least; 2·rows·depth·width FLOPs
// Limits    as linear's v13_dependent. It rounds the product
#include <step2/few_rows.h>

#include "product.h"

namespace kf::KF_BACKEND::linear_bias_dropout_residual {

std::string v6_dependent_can_implement(const Args& a) {
  return few_rows::can_implement(product_of(a), major_of_weight(a), a.dtype);
}

void v6_dependent(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    with_major_of_weight(a.weight_transposed, [&](auto weight) {
      few_rows::launch<weight.value, T>(product_of(a), epilogue_of<T>(a), stream);
    });
  });
}

}  // namespace kf::KF_BACKEND::linear_bias_dropout_residual
