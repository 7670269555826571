// gelu_linear v2_mma: GELU on the way into the product
//
// Idea      x's fragments are in registers before mma.sync takes them: GELU could happen there, and gelu(x) never exist
//           in memory. The catch: each warp needs all of x's row again for its 64 columns, so GELU is computed width/64
//           times.
// Since v1  linear's v5_mma with GeluPrologue (include/step3/prologues.h) between ldmatrix and mma.sync.
// Launch    as linear's v5_mma
// Moves     (rows·depth + depth·width + rows·width + width)·sizeof(T) bytes at the least; 2·rows·depth·width FLOPs and
//           rows·depth·width/64 GELUs
// Limits    as linear's v5_mma; float16 and bfloat16. As v1 it rounds gelu(x)
#include <step3/mma_product.h>

#include "product.h"

namespace kf::KF_BACKEND::gelu_linear {

std::string v2_mma_can_implement(const Args& a) {
  if (size_of(a.dtype) != 2) return "takes float16 or bfloat16";
  return mma::can_implement_product(product_of(a), Major::kK, major_of_weight(a), a.dtype);
}

void v2_mma(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    with_prologue<T>(a, [&](auto weight, const auto& prologue) {
      const Store<T> store{{a.y, a.rows, a.width}};
      mma::launch_product<Major::kK, weight.value, T>(product_of(a), prologue, store, stream);
    });
  });
}

}  // namespace kf::KF_BACKEND::gelu_linear
