// layer_norm_linear v2_mma: rows are normalised on the way into the product
//
// Idea      The product needs of LayerNorm two numbers a row, and the rest is a few operations for each element: they
//           can happen in registers, between ldmatrix and mma.sync. So x is read twice, and the normalised rows are
//           never written. The catch is gelu_linear's: it happens anew for each warp's 64 columns.
// Since     pieces: a first kernel leaves mean and rstd of each row; then linear's v5_mma with NormalizePrologue
//           (include/step3/prologues.h).
// Launch    as layer_norm's v3_registers, then as linear's v5_mma
// Moves     (2·rows·depth + depth·width + rows·width + width + 2·depth)·sizeof(T) bytes at the least;
//           2·rows·depth·width FLOPs, and 5·rows·depth·width/64 for LayerNorm
// Limits    as linear's v5_mma, and depth ≤ 16384; float16 and bfloat16; it rounds the normalised rows
#include <step3/mma_product.h>

#include "product.h"

namespace kf::KF_BACKEND::layer_norm_linear {

std::string v2_mma_can_implement(const Args& a) {
  if (size_of(a.dtype) != 2) return "takes float16 or bfloat16";
  const std::string why_not = can_implement_prologue(a);
  return why_not.empty() ? mma::can_implement_product(product_of(a), Major::kK, major_of_weight(a), a.dtype) : why_not;
}

int64_t v2_mma_scratch_bytes(const Args& a) { return statistics_bytes(a); }

void v2_mma(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    launch_statistics<T>(a, static_cast<float*>(a.scratch), stream);
    with_major_of_weight(a.weight_transposed, [&](auto weight) {
      const Store<T> store{{a.y, a.rows, a.width}};
      mma::launch_product<Major::kK, weight.value, T>(product_of(a), prologue_of<T>(a), store, stream);
    });
  });
}

}  // namespace kf::KF_BACKEND::layer_norm_linear
