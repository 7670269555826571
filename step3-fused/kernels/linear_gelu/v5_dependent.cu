// linear_gelu v5_dependent: few rows, launched before the kernel in front has ended
//
// Idea      linear's v13_dependent with GELU at its end. There each thread has up to four times eight sums and nothing
//           else to do: no need for v3's next tile.
// Since v4  linear's v13 in place of the library
// Launch    as linear's v13_dependent
// Moves     (rows·depth + depth·width + rows·width + width)·sizeof(T) bytes at the least, and rows·width·sizeof(T) more
//           if the preactivation is kept; 2·rows·depth·width FLOPs
// Limits    as linear's v13_dependent. It rounds the product
#include <step2/few_rows.h>

#include "product.h"

namespace kf::KF_BACKEND::linear_gelu {

std::string v5_dependent_can_implement(const Args& a) {
  return few_rows::can_implement(product_of(a), major_of_weight(a), a.dtype);
}

void v5_dependent(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    with_epilogue<T, true>(a, [&](auto weight, const auto& epilogue) {
      few_rows::launch<weight.value, T>(product_of(a), epilogue, stream);
    });
  });
}

}  // namespace kf::KF_BACKEND::linear_gelu
